"""`coserve rejudge`: what new rules, or another version of an expert, would make of images that are stored."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tools.cli.console import AsJson, ConfigPath, console, errors, fail, print_json
from tools.experts.tables import table_of

if TYPE_CHECKING:
    from tools.query.rejudge.job import Result

_LISTED = 20
_NICENESS = 10
_EFFECTS = {
    "false_calls_gone": "false calls that would go",
    "escapes_caught": "escapes that would be caught",
    "new_false_calls": "reviewers' passes that would fail",
    "new_escapes": "reviewers' fails that would pass",
}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(rejudge)


def rejudge(
    config: ConfigPath,
    rules: Annotated[Path | None, typer.Option(metavar="FILE", help="Other rules than those of CONFIG.")] = None,
    expert: Annotated[
        list[str] | None,
        typer.Option("--expert", metavar="NAME=VERSION", help="A version that was put in, or NAME=FOLDER of one."),
    ] = None,
    lot: Annotated[str | None, typer.Option(help="Only images of this lot.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Judged then or later: 2026-11-21, 2h ago.")] = None,
    component: Annotated[str | None, typer.Option(help="Only this component type.")] = None,
    verdict: Annotated[
        Literal["pass", "fail", "review", "unknown"] | None, typer.Option(help="Only images that got this verdict.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 1000,
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
    import os

    from tools.experts.line import open_line
    from tools.query.rejudge.job import JobError, Wish, rejudge_line

    if csv is not None and not csv.absolute().parent.is_dir():
        fail(f"--csv {csv}: there is no folder {csv.absolute().parent}", status=2)
    os.nice(_NICENESS)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    wish = Wish(rules, tuple(expert or ()), lot, since, component, verdict, limit)
    try:
        with _bar() as on_done:
            result = rejudge_line(open_line(config), wish, threads=threads, on_done=on_done, tell=_tell)
    except JobError as error:
        fail(str(error), status=2)
    if csv is not None:
        from tools.query.rejudge.report import write_csv

        write_csv(csv, result.changes)
    if as_json:
        print_json({**result.summary, "list": result.changes})
    else:
        _print(result, csv)
    raise SystemExit(1 if result.changes else 0)


def _tell(sentence: str) -> None:
    """Beside the answer, for whoever waits: not in what a program reads."""
    errors.print(sentence, markup=False)


def _print(result: "Result", csv: Path | None) -> None:
    found = result.summary
    console.print(
        f"{found['rejudged']} images judged again: {found['unchanged']} as before, {found['changed']} would change,"
        f" on {found['boards']} boards"
    )
    for sentence in result.notes:
        console.print(f"note: {sentence}", markup=False)
    if not result.changes:
        return
    cells = [
        (row["from"], "→", row["to"] if row["to"] != row["from"] else "other defect", row["images"])
        for row in found["changes"]
    ]
    table_of("What would change", ("was", "", "would be", "images"), cells)
    if found["reviewed"]:
        effects = [(text, found["effects"][name]) for name, text in _EFFECTS.items()]
        table_of(f"Against {found['reviewed']} reviewed images", ("what", "images"), effects)
    keys = ("inspection_id", "serial", "designator", "component", "verdict", "would_be", "final_verdict")
    title = f"The newest {_LISTED} changes" if len(result.changes) > _LISTED else "Changes"
    columns = ("image", "board", "place", "component", "was", "would be", "reviewer said")
    table_of(title, columns, [[_told(row, key) for key in keys] for row in result.changes[:_LISTED]])
    if len(result.changes) > _LISTED and csv is None:
        console.print("all of them: --csv FILE, or --json")


def _told(row: dict[str, Any], key: str) -> Any:
    """Verdicts with their defects."""
    defect = {"verdict": "defect", "would_be": "would_be_defect"}.get(key)
    return f"{row[key]} {row[defect]}" if defect and row[defect] else row[key]


def _bar() -> Any:
    from tools.query.rejudge.progress import bar

    return bar("judging again")
