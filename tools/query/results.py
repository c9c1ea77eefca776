"""`coserve results`: the number of rows, a table on the terminal, or a file."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from sqlalchemy import Engine

from daemon.config.plant_time import PlantTime
from daemon.config.settings import Config
from daemon.plant.schema import unknown_line
from daemon.plant.settings import HubSettings
from experts.durable import replacing
from tools.query import reading
from tools.query.formats import FILE_MODE, TEXT_WRITERS, clean_up_on_signals, excel_delimiter, write_csv, write_parquet
from tools.query.reading import ResultsQuery
from tools.query.rows import ColumnType
from tools.terminal.console import console, fail, os_errors_end, print_table, say
from tools.terminal.open_line import plant_time, times_note
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
        return f"{title}; {times_note(plant)}" if times.intersection(shown) else title

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
    with replacing(out, FILE_MODE) as part:
        if writer is None:
            types = map(query.rows.column_type, query.columns)
            return write_parquet(part, query.columns, [*types], batches)
        with part.open("w", encoding="utf-8", newline="") as text:
            return writer(text, query.columns, chain.from_iterable(batches))
