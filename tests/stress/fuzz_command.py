"""`coserve fuzz`: broken messages without end, and whether anybody notices."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tools.cli.console import AsJson, console, errors, print_json, print_table

if TYPE_CHECKING:
    from tests.stress.fuzz import Fuzzed


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(fuzz)


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
    import json

    from tests.stress.fuzz import run_fuzz

    def tell(told: "Fuzzed") -> None:
        errors.print(
            f"{told.frames:>9,} frames  {told.messages:>9,} messages  {told.messages / told.seconds:,.0f} a second"
        )

    told = run_fuzz(frames, seed, tell)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(told.as_dict(), indent=2), encoding="utf-8")
    if as_json:
        print_json(told.as_dict())
    else:
        _show(told)
    raise SystemExit(0 if told.holds else 1)


def _show(told: "Fuzzed") -> None:
    print_table("Answers", ("answer", "messages"), [(kind, count) for kind, count in told.answers.most_common()])
    rows = [
        ("frames", told.frames),
        ("messages", told.messages),
        ("messages without an answer", told.unanswered),
        ("answers too many", told.surplus),
        ("answers that are none", told.malformed_answers),
        ("honest images accepted", told.honest_accepted),
        ("honest images refused", told.honest_rejected),
        ("honest p99 to acceptance, ms", told.honest_p99_ms),
        ("honest longest, ms", told.honest_longest_ms),
        ("memory after a tenth and at the end, MB", f"{told.rss_before_mb:.0f}, {told.rss_after_mb:.0f}"),
        ("handles after a tenth and at the end", f"{told.handles_before}, {told.handles_after}"),
        ("messages that broke something", sum(told.broken.values())),
        ("images lost", told.books.lost if told.books else None),
    ]
    print_table(f"{told.seconds:.0f} s, seed {told.seed}", ("what", "count"), rows)
    console.print("holds" if told.holds else "DOES NOT HOLD")
