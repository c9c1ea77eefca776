"""`coserve soak`: long runs of a line among hostile neighbours."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tools.cli.console import AsJson, console, errors, print_json, print_table

if TYPE_CHECKING:
    from tests.stress.soak import Look, Soak


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(soak)


def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 60.0,
    folder: Annotated[Path, typer.Option("--dir", help="Where samples.csv, soak.json, soak.png go.")] = Path(
        "build/soak"
    ),
    publishers: Annotated[int, typer.Option(min=1, help="Honest publishers.")] = 2,
    rate: Annotated[float, typer.Option(min=0.1, help="Images a second of each.")] = 10.0,
    sample: Annotated[float, typer.Option(min=0.5, help="Seconds between two samples.")] = 5.0,
    hostile: Annotated[bool, typer.Option(help="Floods, junk, half messages, peers that vanish, and more.")] = True,
    as_json: AsJson = False,
) -> None:
    """Run a small line under load and look whether anything grows: memory, handles, threads, waits, lost images.

    Publishers at a steady rate, a consumer, queries, reloads, and hostile peers in turn. Exit status 1 where
    something grew or was lost.

    Example: coserve soak --minutes 60
    """
    from tests.stress.picture import draw_soak
    from tests.stress.soak import Plan, run_soak

    def tell(look: "Look") -> None:
        errors.print(
            f"{look.held.at_s / 60:6.1f} min  {look.held.rss_mb:7.1f} MB  {look.held.handles} handles"
            f"  {look.held.threads} threads  p99 {look.p99_ms} ms  backlog {look.backlog}  {look.attack}"
        )

    came_of_it = run_soak(Plan(minutes, publishers, rate, sample, hostile), folder, tell)
    draw_soak(came_of_it, folder / "soak.png")
    if as_json:
        print_json(came_of_it.as_dict())
    else:
        _show(came_of_it, folder)
    raise SystemExit(0 if all(came_of_it.verdicts().values()) else 1)


def _show(came_of_it: "Soak", folder: Path) -> None:
    said = came_of_it.as_dict()
    rows = [(name, "yes" if holds else "NO") for name, holds in came_of_it.verdicts().items()]
    print_table(f"{came_of_it.plan.minutes:g} minutes", ("verdict", "holds"), rows)
    grown = [
        (name, round(found.per_hour, 2), f"{found.lowest:+.2f} to {found.highest:+.2f}")
        for name, found in came_of_it.slopes().items()
    ]
    print_table("Growth per hour after the warm-up", ("what", "slope", "95 % confidence"), grown)
    print_table("Acceptance, ms", list(said["acceptance_ms"]), [list(said["acceptance_ms"].values())])
    if came_of_it.books:
        print_table("Books", ("count", "value"), list(said["books"].items()))
    console.print(f"samples, figures and curves: {folder}")
