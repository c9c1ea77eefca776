"""`coserve soak`: a long run of a line among hostile neighbours; `coserve fuzz`: broken messages without end."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tools.terminal.console import AsJson, console, errors, print_json, print_table

if TYPE_CHECKING:
    from tests.stress.fuzz import FuzzReport


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command(rich_help_panel="For developers")(soak)
    app.command(rich_help_panel="For developers")(fuzz)


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
    from tests.stress.soak import SoakPlan, draw_soak, run_soak

    def show_sample(sample: dict[str, Any]) -> None:
        errors.print(
            f"{sample['at_s'] / 60:6.1f} min  {sample['rss_mb']:7.1f} MB  {sample['handles']} handles"
            f"  {sample['threads']} threads  p99 {sample['p99_ms']} ms  backlog {sample['backlog']}  {sample['attack']}"
        )

    report = run_soak(SoakPlan(minutes, publishers, rate, sample, hostile), folder, show_sample)
    draw_soak(report, folder / "soak.png")
    figures = report.as_dict()
    if as_json:
        print_json(figures)
    else:
        verdicts = [(name, "yes" if holds else "NO") for name, holds in figures["verdicts"].items()]
        print_table(f"{minutes:g} minutes", ("verdict", "holds"), verdicts)
        growth = [
            (name, round(slope.per_hour, 2), f"{slope.lowest:+.2f} to {slope.highest:+.2f}")
            for name, slope in report.slopes().items()
        ]
        print_table("Growth per hour after the warm-up", ("figure", "slope", "95 % confidence"), growth)
        print_table("Acceptance, ms", list(figures["acceptance_ms"]), [list(figures["acceptance_ms"].values())])
        print_table("Results", ("count", "value"), list((figures["books"] or {}).items()))
        console.print(f"samples, figures and curves: {folder}")
    raise SystemExit(0 if all(figures["verdicts"].values()) else 1)


def fuzz(
    frames: Annotated[int, typer.Option(min=1, help="Frames to send; a message has one to seven.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="The same seed sends the same messages.")] = 1,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Send seeded mutations of valid messages to a real daemon, beside an honest publisher.

    Each message must get exactly one answer, nothing may break, no honest image may be lost. Exit status 1 otherwise.

    Example: coserve fuzz --frames 1000000
    """
    from tests.stress.fuzz import run_fuzz

    def show_progress(report: "FuzzReport") -> None:
        errors.print(
            f"{report.frames:>9,} frames  {report.messages:>9,} messages"
            f"  {report.messages / report.seconds:,.0f} a second"
        )

    report = run_fuzz(frames, seed, show_progress)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report.as_dict(), indent=2), encoding="utf-8")
    if as_json:
        print_json(report.as_dict())
    else:
        print_table("Answers", ("answer", "messages"), report.answers.most_common())
        figures = {name: value for name, value in report.as_dict().items() if name not in ("answers", "books")}
        rows = [*figures.items(), ("images lost", report.books.lost if report.books else None)]
        print_table(f"{report.seconds:.0f} s, seed {report.seed}", ("figure", "count"), rows)
        console.print("holds" if report.holds else "DOES NOT HOLD")
    raise SystemExit(0 if report.holds else 1)
