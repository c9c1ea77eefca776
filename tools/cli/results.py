"""`coserve results`, `coserve explain` and `coserve export`: what a quality engineer asks of a line."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tools.cli.console import DEFAULT_CONFIG, AsJson, ConfigOption, fail

if TYPE_CHECKING:
    from tools.query.results import Format


_VERDICTS = ("pass", "fail", "review", "unknown")


def _verdicts(given: list[str] | None) -> list[str] | None:
    for name in given or ():
        if name not in _VERDICTS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(_VERDICTS)}.")
    return given


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    for command in (results, explain, export):
        app.command()(command)


Texts = list[str] | None
Filter = "Filters: repeat one for several values"


def _text(name: str, what: str, *more: str) -> Any:
    return typer.Option(name, *more, metavar=name.strip("-").upper(), help=what, rich_help_panel=Filter)


Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="TIME",
        rich_help_panel=Filter,
        help="Judged then or later: 2026-11-21, 2026-11-21T09:28 (UTC, or with an offset), today, 2h (ago).",
    ),
]
Until = Annotated[
    str | None,
    typer.Option("--until", metavar="TIME", help="Judged before; a day counts whole.", rich_help_panel=Filter),
]


def results(
    config: ConfigOption = DEFAULT_CONFIG,
    serial: Annotated[Texts, _text("--serial", "One board's serial.", "--board")] = None,
    board_type: Annotated[Texts, _text("--type", "Board type.")] = None,
    lot: Annotated[Texts, _text("--lot", "Lot.")] = None,
    station: Annotated[Texts, _text("--station", "Station.")] = None,
    attempt: Annotated[list[int] | None, _text("--attempt", "Attempt at the board, from 1.")] = None,
    component: Annotated[Texts, _text("--component", "Component type.")] = None,
    designator: Annotated[Texts, _text("--designator", "Designator.")] = None,
    verdict: Annotated[
        Texts,
        typer.Option(
            metavar=f"[{'|'.join(_VERDICTS)}]",
            callback=_verdicts,
            help="Final verdict: the newest review wins.",
            rich_help_panel=Filter,
        ),
    ] = None,
    daemon_verdict: Annotated[
        Texts,
        typer.Option(
            metavar=f"[{'|'.join(_VERDICTS)}]",
            callback=_verdicts,
            help="The daemon's own verdict.",
            rich_help_panel=Filter,
        ),
    ] = None,
    defect: Annotated[Texts, _text("--defect", "Final defect.")] = None,
    reason: Annotated[Texts, _text("--reason", "Why an image is unknown, or a board closed.")] = None,
    decided_by: Annotated[Texts, _text("--decided-by", "`daemon`, or a reviewer.")] = None,
    expert: Annotated[Texts, _text("--expert", "An expert that answered.")] = None,
    expert_version: Annotated[Texts, _text("--expert-version", "The version that answered.")] = None,
    rules_version: Annotated[Texts, _text("--rules-version", "The rules that it was judged by.")] = None,
    source: Annotated[Texts, _text("--source", "Camera.")] = None,
    late: Annotated[
        bool | None,
        typer.Option("--late/--in-time", help="Judged after its board had closed, or not.", rich_help_panel=Filter),
    ] = None,
    latency_above: Annotated[
        float | None, typer.Option(metavar="MS", help="Waited longer for its verdict.", rich_help_panel=Filter)
    ] = None,
    seq: Annotated[
        str | None,
        typer.Option(metavar="FROM:TO", help="Numbers of the stream: 100:200, 100:, :200.", rich_help_panel=Filter),
    ] = None,
    since: Since = None,
    until: Until = None,
    boards: Annotated[bool, typer.Option("--boards", help="Boards instead of images.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="A row for each expert's answer.")] = False,
    columns: Annotated[str | None, typer.Option(metavar="NAME,NAME,…", help="These columns only.")] = None,
    order: Annotated[
        str, typer.Option(metavar="ORDER", help="newest, oldest, or a column: latency_ms, latency_ms:desc.")
    ] = "newest",
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many; without it 50 in a table or --json, all in a file.")
    ] = None,
    count: Annotated[bool, typer.Option("--count", help="Only how many there are.")] = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV for a spreadsheet.")] = False,
    as_jsonl: Annotated[bool, typer.Option("--jsonl", help="JSON lines, exactly as stored.")] = False,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Parquet file (extra `export`).", dir_okay=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write there, complete or not at all.", dir_okay=False)
    ] = None,
) -> None:
    """Finished images with their final verdicts, newest first; exit status 0 also where there are none.

    In CSV, text that a spreadsheet would run as a formula (it begins with = + - @) gets an apostrophe in front; JSON
    and Parquet have it as it is.

    Example: coserve results --verdict fail --since today --limit 20 --config demo/coserve.yaml
    """
    from tools.query.batches import Question
    from tools.query.results import NEWEST, Way, show
    from tools.query.results import count as print_count
    from tools.query.rows import BOARDS, IMAGES, STAGES, Filters

    if boards and stages:
        fail("name either --boards or --stages", status=2)
    rows = BOARDS if boards else STAGES if stages else IMAGES
    equal = {
        "serial": serial, "board_type": board_type, "lot": lot, "station": station, "attempt": attempt,
        "component": component, "designator": designator, "verdict": verdict,
        "daemon_verdict": daemon_verdict, "defect": defect, "reason": reason, "decided_by": decided_by,
        "expert": expert, "expert_version": expert_version, "rules_version": rules_version, "source": source,
        "late": None if late is None else [int(late)],
    }  # fmt: skip
    seq_from, seq_to = _range(seq)
    filters = Filters(
        {name: values for name, values in equal.items() if values},
        *(_moment("--since", since, "begin"), _moment("--until", until, "end"), latency_above, seq_from, seq_to),
    )
    file_format, target = _format(as_json, as_csv, as_jsonl, parquet, out)
    is_for_a_person = file_format in {"table", "json"} and target is None
    named = tuple(name.strip() for name in columns.split(",") if name.strip()) if columns else ()
    everything = rows.shown if file_format == "table" else tuple(rows.columns)
    question = Question(rows, named or everything, filters, order, limit or (NEWEST if is_for_a_person else None))
    if count:
        print_count(config, question, as_json=as_json)
    else:
        show(config, question, Way(file_format, target, bool(named)))


def _format(
    as_json: bool, as_csv: bool, as_jsonl: bool, parquet: Path | None, out: Path | None
) -> "tuple[Format, Path | None]":
    """The one format that was asked for, and the file it goes to."""
    from tools.query.results import Format

    asked = {Format.JSON: as_json, Format.CSV: as_csv, Format.JSON_LINES: as_jsonl, Format.PARQUET: parquet is not None}
    wanted = [name for name, is_asked in asked.items() if is_asked]
    if len(wanted) > 1:
        fail(f"name one format, not {' and '.join(f'--{name}' for name in wanted)}", status=2)
    if out is not None and wanted in ([], [Format.PARQUET]):
        fail("--out goes with --csv, --jsonl or --json; --parquet names its file itself", status=2)
    target = parquet if parquet is not None else out
    if target is not None and not target.absolute().parent.is_dir():
        fail(f"no folder {target.absolute().parent}", status=2)
    return (wanted[0] if wanted else Format.TABLE), target


def _moment(option: str, text: str | None, edge: Literal["begin", "end"]) -> str | None:
    from tools.query.moments import MomentError, moment

    if text is None:
        return None
    try:
        return moment(text, datetime.now(UTC), edge)
    except MomentError as error:
        fail(f"{option}: {error}", status=2)


def _range(seq: str | None) -> tuple[int | None, int | None]:
    if seq is None:
        return None, None
    first, colon, last = seq.partition(":")
    try:
        begin, end = (int(part) if part.strip() else None for part in (first, last if colon else first))
    except ValueError:
        fail(f"--seq: expected numbers such as 100:200, 100: or :200, found {seq!r}", status=2)
    return begin, end


def explain(
    name: Annotated[
        str, typer.Argument(metavar="ID", help="An inspection_id, SOURCE/IMAGE_ID, or a serial.", show_default=False)
    ],
    designator: Annotated[str | None, typer.Argument(help="With a serial: the part's place on the board.")] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    board_type: Annotated[
        str | None, typer.Option("--type", help="Board type, where several have this serial.")
    ] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="An earlier attempt; the newest without it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Why an image has its verdict: each step, its rule with its line, the expert's version, and what came after.

    The stored answers are judged once more by the rules of that time; exit status 1 where that gives another verdict.

    Example: coserve explain S0017 R3 --config demo/coserve.yaml
    """
    from tools.query.explain.record import Wanted
    from tools.query.explain.run import explain as tell

    raise SystemExit(tell(config, Wanted(name, designator, board_type, attempt), as_json=as_json))


def export(
    config: ConfigOption = DEFAULT_CONFIG,
    lot: Annotated[Texts, typer.Option(metavar="LOT", help="Boards of this lot; repeat for several.")] = None,
    serial: Annotated[Texts, typer.Option(metavar="SERIAL", help="Boards of this serial.")] = None,
    board_type: Annotated[Texts, typer.Option("--type", metavar="TYPE", help="Boards of this type.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Boards that closed then or later.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before; a day counts whole.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="A new or empty folder.")] = None,
    with_weights: Annotated[bool, typer.Option("--with-weights", help="Also the experts' weights.")] = False,
    verify: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Check a package instead: changed, missing, added files.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an audit package of boards: rows, pictures, rules, versions of experts, with checksums of everything.

    Its rows are one state of the database, also while the line runs. DIR is complete, or it is not there.

    Example: coserve export --lot L42 --out /mnt/audit/L42 --config demo/coserve.yaml
    """
    from tools.query.package.chosen import Selection
    from tools.query.package.export import check_package, make_package

    if verify is not None:
        raise SystemExit(check_package(verify, as_json=as_json))
    selection = Selection(
        *(tuple(lot or ()), tuple(serial or ()), tuple(board_type or ())),
        *(_moment("--since", since, "begin"), _moment("--until", until, "end")),
    )
    if out is None or selection == Selection():
        fail("name --out DIR and which boards: --lot, --serial, --type, --since or --until (or --verify DIR)", status=2)
    make_package(config, selection, out, with_weights=with_weights, as_json=as_json)
