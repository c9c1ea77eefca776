"""A line's verdicts: results, explain, report, people's decisions (review), and who changed the line (changes)."""

import getpass
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.config.plant_time import PlantTime
from tools.terminal.console import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigOption,
    console,
    fail,
    need_folder,
    print_json,
    print_rows,
    say,
)
from tools.terminal.open_line import opened, plant_settings_of, plant_time, settings_of
from tools.terminal.option_values import shift_option, since_option, time_window, until_option

if TYPE_CHECKING:
    from tools.query.formats import RowFormat

Texts = list[str] | None
BoardType = Annotated[str | None, typer.Option("--type", help="Its board type, where several have this serial.")]
Attempt = Annotated[int | None, typer.Option(min=1, help="An earlier attempt; default: the newest.")]
_VERDICTS = "[pass|fail|review|unknown]"
_PANEL = "Filters: repeat one for several values"
#: The newest changes of a table.
_SHOWN = 50


class VerdictOption(StrEnum):
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
    since: Annotated[str | None, since_option("Judged then or later", _PANEL)] = None,
    until: Annotated[str | None, until_option("Judged before", _PANEL)] = None,
    shift: Annotated[str | None, shift_option("Judged", _PANEL)] = None,
    boards: Annotated[bool, typer.Option("--boards", help="Boards instead of images.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="A row for each expert's answer.")] = False,
    columns: Annotated[str | None, typer.Option(metavar="NAME,NAME,…", help="These columns only.")] = None,
    order: Annotated[
        str, typer.Option(metavar="ORDER", help="newest, oldest, or a column: latency_ms, latency_ms:desc.")
    ] = "newest",
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many; default: 50 in a table, else all.")
    ] = None,
    count: Annotated[bool, typer.Option("--count", help="Only how many there are.")] = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV for a spreadsheet.")] = False,
    excel: Annotated[
        bool, typer.Option("--excel", help="CSV that this locale's Excel opens by a double click; text stays text.")
    ] = False,
    delimiter: Annotated[
        str | None, typer.Option(metavar="CHAR", help="With --csv: what separates cells, such as ; or tab.")
    ] = None,
    as_jsonl: Annotated[bool, typer.Option("--jsonl", help="JSON lines, exactly as stored.")] = False,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Parquet file (extra `export`).", dir_okay=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write there, complete or not at all.", dir_okay=False)
    ] = None,
) -> None:
    """Finished images with their final verdicts, newest first; exit status 0 also where there are none.

    In CSV, text that a spreadsheet would run as a formula (it begins with = + - @) gets an apostrophe in front; with
    --excel, serials such as 0012, 1E41 or 3-4 are ="0012". JSON and Parquet have them as they are.

    With --plant the rows are those of all lines, each with its line.

    Example: coserve results --verdict fail --since today --limit 20 --config demo/coserve.yaml
    """
    from tools.query.formats import DEFAULT_LIMIT, print_or_write
    from tools.query.plant_rows import PLANT_BOARDS, PLANT_IMAGES
    from tools.query.reading import ResultsQuery
    from tools.query.rows import BOARDS, IMAGES, STAGES, RowFilters

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
    row_format, target = _format(as_json, as_csv or excel, as_jsonl, parquet, out)
    sign = {"tab": "\t", "\\t": "\t"}.get(delimiter or "", delimiter)
    if sign is not None and (row_format != "csv" or len(sign) != 1 or sign.isalnum() or sign in "\"'\r\n.-"):
        fail(f"--delimiter goes with --csv, and is one character such as ; or tab, not {delimiter!r}", status=2)
    names = tuple(name.strip() for name in columns.split(",") if name.strip()) if columns else ()
    default_names = rows.terminal_columns if row_format == "table" else tuple(rows.columns)
    if limit is None and row_format == "table":
        limit = DEFAULT_LIMIT
    query = ResultsQuery(rows, names or default_names, filters, order, limit)
    how: dict[str, Any] = {"all_columns": bool(names), "for_excel": excel, "delimiter": sign}
    print_or_write(settings, query, row_format, target, only_count=count, **how)


def _format(
    as_json: bool, as_csv: bool, as_jsonl: bool, parquet: Path | None, out: Path | None
) -> "tuple[RowFormat, Path | None]":
    options = {"json": as_json, "csv": as_csv, "jsonl": as_jsonl, "parquet": parquet is not None}
    formats: list[Any] = [name for name, is_wanted in options.items() if is_wanted]
    if len(formats) > 1:
        fail(f"name one format, not {' and '.join(f'--{name}' for name in formats)}", status=2)
    if out is not None and formats in ([], ["parquet"]):
        fail("--out goes with --csv, --jsonl or --json; --parquet names its file itself", status=2)
    target = parquet if parquet is not None else out
    if target is not None:
        need_folder(target.absolute().parent)
    return (formats[0] if formats else "table"), target


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
    board_type: BoardType = None,
    attempt: Attempt = None,
    as_json: AsJson = False,
) -> None:
    """Explain an image's verdict: each step, its rule with its line, the expert's version, and what came after.

    The stored answers are judged once more by the rules of that time; exit status 1 where that gives another verdict.

    Example: coserve explain S0017 R3 --config demo/coserve.yaml
    """
    from tools.query.explain import print_explanation

    raise SystemExit(print_explanation(config, (name, designator, board_type, attempt), as_json=as_json))


def report(
    serial: Annotated[str, typer.Argument(help="The board's serial.", show_default=False)],
    config: ConfigOption = DEFAULT_CONFIG,
    board_type: BoardType = None,
    attempt: Attempt = None,
    model: Annotated[
        str | None, typer.Option(help="The language model that writes; default: the first of `models`.")
    ] = None,
    template: Annotated[
        bool, typer.Option("--template", help="Use the template even if a model is configured.")
    ] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=0.1, help="Seconds that the model may take.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Explain a board's failures from its rows: by a template, or by a language model that the running line serves.

    Where a model is configured and cannot write, the template does, and the output says so.

    Example: coserve report S0017 --config demo/coserve.yaml
    """
    from tools.query.reading import read_attempt
    from tools.query.report import NoTextError, board_document, in_words, written_by_model

    with opened(config) as (settings, engine):
        if model is not None and model not in settings.models:
            fail(f"{config} names no model {model}: {', '.join(settings.models) or 'it has none'}", status=2)
        board = read_attempt(engine, serial, board_type, attempt)
    writer, why = None if template else model or next(iter(settings.models), None), None
    by_template = text = in_words(board, settings.plant.clock())
    if writer is not None:
        try:
            text = written_by_model(settings, writer, board, wait_s)
        except NoTextError as error:
            writer, why = None, f"model {writer}: {error}"
    if as_json:
        print_json({"by": writer or "template", "why_not_the_model": why, "text": text, **board_document(board)})
        return
    console.print(text)
    if writer is not None:
        console.print(f"(written by model {writer}; the rows say:)\n{by_template}")
    elif not template:
        console.print(f"(by the template: {why or f'{config} names no language model'})")


def review(
    image: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="The image: its inspection_id (with --board a serial or board_id).", show_default=False
        ),
    ] = None,
    verdict: Annotated[
        str | None, typer.Argument(metavar="VERDICT", help="pass, fail, unknown or review.", show_default=False)
    ] = None,
    defect: Annotated[
        str | None,
        typer.Option(metavar="CODE", help="What is wrong, with fail: a code or its label; else the line's own."),
    ] = None,
    new_code: Annotated[
        bool, typer.Option("--new-code", help="Take a --defect that neither rules nor results have.")
    ] = False,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="What the next reader should know.")] = None,
    reviewer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who decides; default: the user of this terminal.")
    ] = None,
    after: Annotated[
        int | None, typer.Option(metavar="REVIEW", min=1, help="Overrule this review, which you have seen.")
    ] = None,
    undo: Annotated[
        str | None, typer.Option("--undo", metavar="ID", help="Take back the newest decision about this image.")
    ] = None,
    board: Annotated[
        bool,
        typer.Option("--board", help="ID is a board's serial (its newest attempt) or board_id: release or scrap it."),
    ] = False,
    board_type: Annotated[
        str | None, typer.Option("--type", help="With --board, ID is a serial of this board type.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Print what waits for a decision, oldest board first.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Images of --list.")] = 50,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Decide about an image or a board: what a person says counts, the line's verdict stays beside it.

    With --board the decision is about the whole board, such as one with a missing or unjudgeable image.

    Example: coserve review 1042 fail --defect D207 --note "pad 3" --reviewer Eva --config demo/coserve.yaml
    """
    if sum((show, undo is not None, image is not None)) != 1:
        fail("name an image and a verdict, or --undo ID, or --list: see coserve review --help", status=2)
    name = undo or image or ""
    number = _number(name) if name and not board else None
    if undo is not None and (verdict is not None or defect is not None or note is not None):
        fail("--undo takes no verdict, defect or note: it restores the decision before", status=2)
    if image is not None and verdict is None:
        fail("which verdict? pass, fail, unknown or review: coserve review ID VERDICT", status=2)
    if board_type is not None and not board:
        fail("--type goes with --board SERIAL", status=2)
    from tools.query.review import decide, find_board, waiting_images

    settings = settings_of(config)
    if show:
        _print_waiting(waiting_images(settings, limit + 1), limit, settings.plant.clock(), as_json=as_json)
        return
    subject = {"inspection_id": number} if not board else {"board_id": find_board(settings, name, board_type)}
    what = {**subject, "undo": True} if undo is not None else {**subject, "verdict": verdict}
    fields = {"defect": defect, "note": note, "reviewer": reviewer or getpass.getuser(), "newest": after}
    review = decide(config, settings, what | fields, new_code=new_code)
    say(review, _sentence(review, is_undone=undo is not None), as_json=as_json)


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 100 or int(text) < 1:
        fail(f"ID: expected a whole number from 1, not {text!r}: `coserve review --list` shows it", status=2)
    return int(text)


def _sentence(review: Mapping[str, Any], *, is_undone: bool) -> str:
    defect = f" {review['defect']}" if review["defect"] else ""
    subject, answer = f"image {review['inspection_id']}", review["verdict"]
    if review["board_id"] is not None:
        subject, answer = f"board {review['board_id']}", review["board_verdict"]
    verdict = f"{subject} is {answer}{defect}{' again' if is_undone else ''}"
    return f"{verdict}, says {review['reviewer']} (review {review['review_id']})"


def _print_waiting(rows: list[dict[str, Any]], limit: int, plant: PlantTime, *, as_json: bool) -> None:
    if not rows and not as_json:
        console.print("nothing waits for a decision")
        return
    columns = (
        *(("id", "inspection_id"), ("serial", lambda row: f"{row['serial']} #{row['attempt']}"), "designator"),
        *(("line says", "verdict"), ("defect", lambda row: row["defect"] or row["reason"])),
        ("since", lambda row: plant_time(plant, row["completed_at"], "short")),
        *("component", ("board", "board_type"), "lot", ("picture", "image_path")),
    )
    title, unbroken = f"Waiting for a decision; times of {plant.timezone}", ("id", "line says", "since")
    print_rows(title, rows[:limit], columns, as_json=as_json, unbroken=unbroken, more="--json has them")
    if len(rows) > limit and not as_json:
        console.print(f"and more: --limit {limit * 2}")


def changes(
    config: ConfigOption = DEFAULT_CONFIG,
    since: Annotated[str | None, since_option("Changes made then or later")] = None,
    until: Annotated[str | None, until_option("Changes made before")] = None,
    shift: Annotated[str | None, shift_option("Changes made")] = None,
    subject: Annotated[
        str | None,
        typer.Option(metavar="SUBJECT", help="Of this alone: rules, CoServe, an expert, or a key of coserve.yaml."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what people and the daemon changed, newest first: starts, rules, experts, limits, keys, settings, restores.

    Example: coserve changes --subject rules --config demo/coserve.yaml
    """
    from sqlalchemy import select

    from daemon.storage.database import schema

    since, until = time_window(config, since, until, shift)
    table = schema.changes.c
    query = select(schema.changes).order_by(table.at.desc(), table.change_id.desc())
    query = query if since is None else query.where(table.at >= since)
    query = query if until is None else query.where(table.at < until)
    query = query if subject is None else query.where(table.subject == subject)
    query = query if as_json else query.limit(_SHOWN + 1)
    with opened(config) as (settings, engine), engine.connect() as connection:
        rows = [dict(row) for row in connection.execute(query).mappings()]
    plant = settings.plant.clock()
    at = ("at", lambda row: plant_time(plant, row["at"], "short"))
    columns = (at, "who", "what", "subject", ("old → new: note", _old_and_new))
    shown = rows if as_json else rows[:_SHOWN]
    print_rows(f"Changes; times of {plant.timezone}", shown, columns, as_json=as_json, unbroken=("at", "what"))
    if len(rows) > len(shown):
        console.print(f"The newest {_SHOWN}; --until shows earlier ones, --json all")


def _old_and_new(row: Mapping[str, Any]) -> str | None:
    old, new, note = (row[name] for name in ("old", "new", "note"))
    change = f"{old or '–'} → {new or '–'}" if old else new
    return ": ".join(filter(None, (change, note))) or None
