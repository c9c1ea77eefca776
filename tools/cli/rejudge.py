"""`coserve rejudge`: the verdicts that other rules, or another version of an expert, would give to stored images."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from daemon.units import count_text
from tools.terminal.console import AsJson, ConfigPath, console, errors, fail, print_json, print_table
from tools.terminal.option_values import shift_option, since_option, time_window, until_option

_LISTED = 20
_NICENESS = 10


def rejudge(
    config: ConfigPath,
    rules: Annotated[Path | None, typer.Option(metavar="FILE", help="Other rules than those of CONFIG.")] = None,
    expert: Annotated[
        list[str] | None,
        typer.Option("--expert", metavar="NAME=VERSION", help="A version that was put in, or NAME=FOLDER of one."),
    ] = None,
    lot: Annotated[str | None, typer.Option(help="Only images of this lot.")] = None,
    since: Annotated[str | None, since_option("Judged then or later: 2026-11-21, 2h ago.")] = None,
    until: Annotated[str | None, until_option("Judged before; a day counts whole.")] = None,
    shift: Annotated[str | None, shift_option()] = None,
    component: Annotated[str | None, typer.Option(help="Only this component type.")] = None,
    verdict: Annotated[
        Literal["pass", "fail", "review", "unknown"] | None, typer.Option(help="Only images that got this verdict.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="N images chosen at random; without it all.", show_default=False),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Processor threads; the line needs the others.")] = 1,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write a row per change to FILE.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge stored images again, with other rules or experts, and list what would change. Changes nothing itself.

    Images are judged exactly as by the daemon, in a process of its own at low priority. With --expert alone only images
    that this expert answered are taken: the others cannot change. Exit status 0: nothing would change; 1: something
    would; 2: wrong use. Reviewers' decisions say whether a change is for the better.

    Example: coserve rejudge demo/coserve.yaml --expert R0402=5c1e --since 2d --csv changes.csv
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from tools.experts.line import open_line
    from tools.query.rejudge import RejudgeRequest, rejudge_line, write_csv
    from tools.terminal.progress import Bars

    if csv is not None and not csv.absolute().parent.is_dir():
        fail(f"--csv {csv}: there is no folder {csv.absolute().parent}", status=2)
    os.nice(_NICENESS)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    since, until = time_window(config, since, until, shift)
    request = RejudgeRequest(rules, tuple(expert or ()), lot, since, component, verdict, sample, until)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=errors, transient=True) as bars:
        task = bars.add_task("judging again", total=None)
        summary, changes = rejudge_line(
            open_line(config),
            request,
            threads=threads,
            on_progress=lambda total: bars.update(task, advance=1, total=total),
            announce=lambda sentence: errors.print(sentence, markup=False),
        )
    if csv is not None:
        write_csv(csv, changes)
    if as_json:
        print_json({**summary, "list": changes})
    else:
        print_summary(summary, changes, None if csv is not None else "--csv FILE, or --json")
    raise SystemExit(1 if changes else 0)


def print_summary(summary: dict[str, Any], changes: list[dict[str, Any]], more: str | None) -> None:
    """Print what `rejudge_line` returned; `more` says where all changes are."""
    from tools.query.rejudge import EFFECTS

    console.print(
        f"{count_text(summary['rejudged'], 'image')} judged again: {summary['unchanged']} as before,"
        f" {summary['changed']} would change, on {count_text(summary['boards'], 'board')}"
    )
    for sentence in summary["notes"]:
        console.print(f"note: {sentence}", markup=False)
    if summary["differences"]:
        differences = [(row["what"], row["images"]) for row in summary["differences"]]
        print_table("Different from then", ("then → now", "images"), differences)
    if not changes:
        return
    cells = [
        (row["from"], "→", row["to"] if row["to"] != row["from"] else "other defect", row["images"])
        for row in summary["changes"]
    ]
    print_table("What would change", ("was", "", "would be", "images"), cells)
    if summary["reviewed"]:
        effects = [(words, summary["effects"][name]) for name, words in EFFECTS.items()]
        print_table(f"Against {count_text(summary['reviewed'], 'reviewed image')}", ("what", "images"), effects)
    keys = ("inspection_id", "serial", "designator", "component", "verdict", "would_be", "final_verdict")
    title = f"The newest {_LISTED} changes" if len(changes) > _LISTED else "Changes"
    columns = ("image", "board", "place", "component", "was", "would be", "reviewer said")
    rows = [[_with_defect(row, key) for key in keys] for row in changes[:_LISTED]]
    print_table(title, columns, rows, unbroken=("image",))
    if len(changes) > _LISTED and more is not None:
        console.print(f"all of them: {more}")


def _with_defect(row: dict[str, Any], key: str) -> Any:
    """Return a cell; verdicts have their defects behind them."""
    defect = {"verdict": "defect", "would_be": "would_be_defect"}.get(key)
    return f"{row[key]} {row[defect]}" if defect and row[defect] else row[key]
