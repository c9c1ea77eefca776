"""Rows for people and programs: a table, CSV, JSON, JSON lines, or Parquet for notebooks."""

import csv
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TextIO

from sqlalchemy import Engine

from daemon.config.plant_time import PlantTime
from daemon.config.settings import Config
from daemon.errors import MissingExtraError
from daemon.plant.schema import unknown_line
from daemon.plant.settings import HubSettings
from daemon.units import spreadsheet_cell
from experts.durable import replacing
from tools.query import reading
from tools.query.reading import Batch, ResultsQuery
from tools.query.rows import ColumnType
from tools.terminal.console import console, fail, os_errors_end, print_table, say
from tools.terminal.open_line import plant_time
from tools.terminal.open_line import reading as open_database

RowFormat = Literal["table", "csv", "json", "jsonl", "parquet"]
#: Rows that a person sees without `--limit`; files and programs have all.
DEFAULT_LIMIT = 50
#: All rows of a table are in memory, since its columns are as wide as its longest cells.
_MAX_TABLE_ROWS = 10_000
#: Short columns that people look up or copy: kept on one line.
_UNBROKEN = (
    *("verdict", "daemon_verdict", "inspection_id", "board_id", "attempt", "step"),
    *("expert_version", "expert_settings", "rules_version"),
)
#: Their decimal sign is a point; most others have a comma.
_POINT_LANGUAGES = {"C", "POSIX", "en", "ja", "ko", "zh", "th", "he", "hi", "ms"}


def write_csv(
    file: TextIO,
    names: Sequence[str],
    rows: Iterable[Sequence[Any]],
    delimiter: str = ",",
    excel_types: Sequence[ColumnType] = (),
) -> int:
    """Write a header and rows; an empty cell is a null. Return the number of rows, as the others do.

    With the types of the columns it is what Excel opens by a double click.
    """
    writer, count = csv.writer(file, delimiter=delimiter, lineterminator="\n"), 0
    file.write("\ufeff" if excel_types else "")
    writer.writerow(names)
    for count, row in enumerate(rows, 1):  # noqa: B007 - the last one is the number of rows
        writer.writerow(
            map(partial(_excel_cell, delimiter), excel_types, row) if excel_types else map(spreadsheet_cell, row)
        )
    return count


def _excel_cell(delimiter: str, kind: ColumnType, value: Any) -> Any:
    """Keep text as text, be it 007, 1E41, MAR1, 3-4 or =1+1, and numbers where lists are separated by `;`.

    There 12.345 would be read as twelve thousand. A text in a formula has 255 characters at most.
    """
    if isinstance(value, float):
        return str(value).replace(".", "," if delimiter == ";" else ".")
    if kind == "time" or not isinstance(value, str) or value.isalpha() or len(value) > 255:
        return spreadsheet_cell(value)
    return '="' + value.replace('"', '""') + '"'


def excel_delimiter() -> str:
    """Return the sign that separates lists in the Excel of this locale."""
    name = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_NUMERIC", "LANG"))), "C")
    return "," if name.partition("_")[0].partition(".")[0] in _POINT_LANGUAGES else ";"


def write_json_lines(file: TextIO, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> int:
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        file.write(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n")
    return count


def write_json(file: TextIO, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> int:
    count = 0
    for count, row in enumerate(rows, 1):
        text = json.dumps(dict(zip(names, row, strict=True)), indent=2, ensure_ascii=False)
        file.write(("[" if count == 1 else ",") + "\n  " + text.replace("\n", "\n  "))
    file.write("\n]\n" if count else "[]\n")
    return count


TEXT_WRITERS = {"csv": write_csv, "jsonl": write_json_lines, "json": write_json}


def write_parquet(path: Path, names: Sequence[str], types: Sequence[ColumnType], batches: Iterable[Batch]) -> int:
    """Write typed columns: times are UTC timestamps to the millisecond. Raises MissingExtraError without pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter
    except ImportError:
        raise MissingExtraError("pyarrow", "Parquet", "export") from None
    kinds = {"text": pa.string(), "int": pa.int64(), "real": pa.float64(), "time": pa.timestamp("ms", tz="UTC")}
    schema: Any = pa.schema([(name, kinds[kind]) for name, kind in zip(names, types, strict=True)])
    count = 0
    with ParquetWriter(path, schema) as writer:
        for batch in batches:
            count += len(batch)
            columns = zip(zip(*batch, strict=True), types, schema, strict=True)
            arrays = [
                pa.array([at and datetime.fromisoformat(at) for at in values] if kind == "time" else values, field.type)
                for values, kind, field in columns
            ]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    return count


def clean_up_on_signals(handle: Callable[..., Any] | None = None) -> None:
    """End the command on SIGTERM or with its terminal as on Ctrl-C: delete unfinished files, stop what it started.

    Without `handle` the command names the signal and exits with status 1.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, handle or (lambda sent, _: fail(f"stopped by {signal.Signals(sent).name}", status=1)))


def print_or_write(
    settings: Config | HubSettings,
    query: ResultsQuery,
    row_format: RowFormat,
    out: Path | None,
    *,
    only_count: bool,
    all_columns: bool,
    for_excel: bool = False,
    delimiter: str | None = None,
) -> None:
    """Print the rows, or write them to `out`; `all_columns` in a table even where they are too wide or empty."""
    with open_database(settings) as engine:
        query.validate()
        if only_count:
            count = reading.count_rows(engine, query)
            say({"count": count}, str(count), as_json=row_format == "json")
            return
        if row_format == "table":
            _print_table(engine, query, settings.plant.clock(), all_columns=all_columns)
            return
        writer: Any = TEXT_WRITERS.get(row_format)
        if for_excel or delimiter:
            types: Sequence[ColumnType] = [*map(query.rows.column_type, query.columns)] if for_excel else ()
            writer = partial(write_csv, delimiter=delimiter or excel_delimiter(), excel_types=types)
        with os_errors_end(out or Path("standard output")):
            try:
                count = _write(engine, query, writer, out)
            except BrokenPipeError:  # the reader of a pipe, such as `head`, has ended
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise SystemExit(0) from None
    if out is not None:
        console.print(f"{out}: {count:,} {query.rows.name}")


def _print_table(engine: Engine, query: ResultsQuery, plant: PlantTime, *, all_columns: bool) -> None:
    if query.limit is None or query.limit > _MAX_TABLE_ROWS:
        fail(f"a table has at most {_MAX_TABLE_ROWS} rows: lower --limit, or write --csv", status=2)
    times = {name for name in query.columns if query.rows.column_type(name) == "time"}
    cells = [
        [
            plant_time(plant, value, "short") if name in times else _cell(name, value)
            for name, value in zip(query.columns, row, strict=True)
        ]
        for batch in reading.read_batches(engine, query)
        for row in batch
    ]
    if not cells:
        none = f"{query.rows.name.capitalize()}: none{_about_patterns(query)}"
        with engine.connect() as connection:
            unknown = [unknown_line(connection, str(line)) for line in query.filters.equal.get("line", ())]
        console.print("; ".join([none, *filter(None, unknown)]))
        return
    columns: Sequence[str] = query.columns
    more: str | None = None
    if not all_columns:
        kept = [at for at in range(len(columns)) if any(row[at] is not None for row in cells)]
        columns, cells = [columns[at] for at in kept], [[row[at] for at in kept] for row in cells]
        more = "--columns, --csv"
    title = _title(query, len(cells), partial(reading.count_rows, engine, query))

    def full_title(shown: Sequence[str]) -> str:
        return f"{title}; times of {plant.timezone}" if times.intersection(shown) else title

    unbroken = [name for name in columns if name in times or name in _UNBROKEN]
    print_table(full_title, columns, cells, unbroken=unbroken, more=more)


def _cell(name: str, value: Any) -> Any:
    """Shorten a fraction to four digits; number steps from 1 for people."""
    if name == "step":
        return value + 1
    if not isinstance(value, float):
        return value
    return f"{value:.4g}" if abs(value) < 1 else f"{value:.1f}"


def _about_patterns(query: ResultsQuery) -> str:
    values = [value for several in query.filters.equal.values() for value in several]
    has_pattern = any(isinstance(value, str) and ("*" in value or "?" in value) for value in values)
    return " (patterns are not understood: values are compared whole)" if has_pattern else ""


def _title(query: ResultsQuery, count: int, count_all: Callable[[], int]) -> str:
    name = query.rows.name.capitalize()
    if count != query.limit:
        return f"{name}: {count}"
    number = f"{count} of {count_all()}"
    order = f"first {number} by {query.order}" if query.sort_column else f"{query.order} {number}"
    return f"{name}: the {order} (--limit for more)"


def _write(engine: Engine, query: ResultsQuery, writer: Any, out: Path | None) -> int:
    batches = reading.read_batches(engine, query)
    if out is None:
        # Rows for a program are exact; a terminal gets no text that steers it.
        file: Any = SimpleNamespace(write=partial(console.print, end="")) if sys.stdout.isatty() else sys.stdout
        count = writer(file, query.columns, chain.from_iterable(batches))
        sys.stdout.flush()
        return count
    clean_up_on_signals()
    with replacing(out, 0o640) as part:
        if writer is None:
            types = map(query.rows.column_type, query.columns)
            return write_parquet(part, query.columns, [*types], batches)
        with part.open("w", encoding="utf-8", newline="") as text:
            return writer(text, query.columns, chain.from_iterable(batches))
