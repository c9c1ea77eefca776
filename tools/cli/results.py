"""`coserve results` and `coserve explain`: the questions of a quality engineer about a line's verdicts."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tools.terminal.console import DEFAULT_CONFIG, AsJson, ConfigOption, fail
from tools.terminal.option_values import shift_option, since_option, time_window, until_option

if TYPE_CHECKING:
    from tools.query.results import RowFormat

Texts = list[str] | None
_VERDICTS = "[pass|fail|review|unknown]"
_PANEL = "Filters: repeat one for several values"


class VerdictOption(StrEnum):
    """Verdicts that an option takes."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    REVIEW = "review"
    UNKNOWN = "unknown"


def _filter(name: str, help_text: str, *aliases: str, metavar: str | None = None) -> Any:
    shown = metavar or name.strip("-").upper()
    return typer.Option(name, *aliases, metavar=shown, help=help_text, rich_help_panel=_PANEL)


def results(
    config: ConfigOption = DEFAULT_CONFIG,
    plant: Annotated[
        Path | None, typer.Option(metavar="FILE", help="All lines of the hub that this plant.yaml describes.")
    ] = None,
    line: Annotated[Texts, _filter("--line", "With --plant: a line's name.")] = None,
    serial: Annotated[Texts, _filter("--serial", "One board's serial.", "--board")] = None,
    board_type: Annotated[Texts, _filter("--type", "Board type.")] = None,
    lot: Annotated[Texts, _filter("--lot", "Lot.")] = None,
    station: Annotated[Texts, _filter("--station", "Station.")] = None,
    attempt: Annotated[list[int] | None, _filter("--attempt", "Attempt at the board, from 1.")] = None,
    component: Annotated[Texts, _filter("--component", "Component type.")] = None,
    designator: Annotated[Texts, _filter("--designator", "Designator.")] = None,
    verdict: Annotated[
        list[VerdictOption] | None, _filter("--verdict", "Final verdict: the newest review wins.", metavar=_VERDICTS)
    ] = None,
    daemon_verdict: Annotated[
        list[VerdictOption] | None, _filter("--daemon-verdict", "The daemon's own verdict.", metavar=_VERDICTS)
    ] = None,
    defect: Annotated[Texts, _filter("--defect", "Final defect.")] = None,
    reason: Annotated[Texts, _filter("--reason", "Why an image is unknown, or a board closed.")] = None,
    decided_by: Annotated[Texts, _filter("--decided-by", "`daemon`, or a reviewer.")] = None,
    expert: Annotated[Texts, _filter("--expert", "An expert that answered.")] = None,
    expert_version: Annotated[Texts, _filter("--expert-version", "The version that answered.")] = None,
    expert_settings: Annotated[Texts, _filter("--expert-settings", "The settings that it answered with.")] = None,
    rules_version: Annotated[Texts, _filter("--rules-version", "The rules that judged it.")] = None,
    source: Annotated[Texts, _filter("--source", "Camera.")] = None,
    late: Annotated[
        bool | None,
        typer.Option("--late/--in-time", help="Judged after its board had closed, or not.", rich_help_panel=_PANEL),
    ] = None,
    latency_above: Annotated[
        float | None, typer.Option(metavar="MS", help="Waited longer for its verdict.", rich_help_panel=_PANEL)
    ] = None,
    seq: Annotated[
        str | None, _filter("--seq", "Numbers of the stream: 100:200, 100:, :200.", metavar="FROM:TO")
    ] = None,
    since: Annotated[
        str | None,
        since_option(
            "Judged then or later: 2026-11-21, 2026-11-21T09:28, 09:28 (the plant's clock), today, 2h (ago).", _PANEL
        ),
    ] = None,
    until: Annotated[str | None, until_option("Judged before; a day counts whole.", _PANEL)] = None,
    shift: Annotated[str | None, shift_option(_PANEL)] = None,
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

    With --plant the rows are those of all lines, each with its line.

    Example: coserve results --verdict fail --since today --limit 20 --config demo/coserve.yaml
    """
    from tools.query.plant_rows import PLANT_BOARDS, PLANT_IMAGES
    from tools.query.reading import ResultsQuery
    from tools.query.results import DEFAULT_LIMIT, print_count, print_or_write
    from tools.query.rows import BOARDS, IMAGES, STAGES, RowFilters
    from tools.terminal.open_line import plant_settings_of, settings_of

    if boards and stages:
        fail("name either --boards or --stages", status=2)
    if plant is None and line:
        fail("--line goes with --plant: one line's results have no other", status=2)
    if plant is not None and stages:
        fail("--stages goes with one line: the hub has one row for each image", status=2)
    rows = BOARDS if boards else STAGES if stages else IMAGES
    if plant is not None:
        rows = PLANT_BOARDS if boards else PLANT_IMAGES
    settings = settings_of(config) if plant is None else plant_settings_of(plant)
    equal = {
        "serial": serial, "board_type": board_type, "lot": lot, "station": station, "attempt": attempt,
        "component": component, "designator": designator, "verdict": verdict,
        "daemon_verdict": daemon_verdict, "defect": defect, "reason": reason, "decided_by": decided_by,
        "expert": expert, "expert_version": expert_version, "expert_settings": expert_settings,
        "rules_version": rules_version, "source": source, "line": line, "late": None if late is None else [int(late)],
    }  # fmt: skip
    seq_from, seq_to = _range(seq)
    since, until = time_window(settings.plant.clock(), since, until, shift)
    values = {name: list(choices) for name, choices in equal.items() if choices}
    filters = RowFilters(values, since, until, latency_above, seq_from, seq_to)
    row_format, target = _format(as_json, as_csv, as_jsonl, parquet, out)
    names = tuple(name.strip() for name in columns.split(",") if name.strip()) if columns else ()
    default_names = rows.terminal_columns if row_format == "table" else tuple(rows.columns)
    if limit is None and row_format in {"table", "json"} and target is None:
        limit = DEFAULT_LIMIT
    query = ResultsQuery(rows, names or default_names, filters, order, limit)
    if count:
        print_count(settings, query, as_json=as_json)
    else:
        print_or_write(settings, query, row_format, target, all_columns=bool(names))


def _format(
    as_json: bool, as_csv: bool, as_jsonl: bool, parquet: Path | None, out: Path | None
) -> "tuple[RowFormat, Path | None]":
    """Return the one format that was asked for, and the file it goes to."""
    from tools.query.results import RowFormat

    options = {
        RowFormat.JSON: as_json,
        RowFormat.CSV: as_csv,
        RowFormat.JSON_LINES: as_jsonl,
        RowFormat.PARQUET: parquet is not None,
    }
    formats = [name for name, is_wanted in options.items() if is_wanted]
    if len(formats) > 1:
        fail(f"name one format, not {' and '.join(f'--{name}' for name in formats)}", status=2)
    if out is not None and formats in ([], [RowFormat.PARQUET]):
        fail("--out goes with --csv, --jsonl or --json; --parquet names its file itself", status=2)
    target = parquet if parquet is not None else out
    if target is not None and not target.absolute().parent.is_dir():
        fail(f"no folder {target.absolute().parent}", status=2)
    return (formats[0] if formats else RowFormat.TABLE), target


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
    """Explain an image's verdict: each step, its rule with its line, the expert's version, and what came after.

    The stored answers are judged once more by the rules of that time; exit status 1 where that gives another verdict.

    Example: coserve explain S0017 R3 --config demo/coserve.yaml
    """
    from tools.query.explain import print_explanation
    from tools.query.reading import InspectionName

    inspection = InspectionName(name, designator, board_type, attempt)
    raise SystemExit(print_explanation(config, inspection, as_json=as_json))
