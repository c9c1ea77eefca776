"""What `coserve results` does once its options are read: a count, a table, or a file."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from sqlalchemy import Engine

from daemon.errors import MissingExtraError
from experts.durable import replacing
from tools.cli.console import console, fail, print_json
from tools.cli.open_line import opened
from tools.query import batches
from tools.query.batches import Question
from tools.query.files import MODE, leave_cleanly, why
from tools.query.formats import Csv, Json, JsonLines, Parquet, Writer
from tools.query.rows import NotAskedOfError
from tools.query.table import print_rows

#: What a person looks at; files have everything.
NEWEST = 50
#: All of a table is in memory, since its columns are as wide as its longest cells.
MOST_IN_A_TABLE = 10_000


class Format(StrEnum):
    """How rows are written."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    JSON_LINES = "jsonl"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class Way:
    """How and where. `out` is None for standard output; `columns_named` where the person chose the columns."""

    format: Format
    out: Path | None
    columns_named: bool


def count(config: Path, question: Question, *, as_json: bool) -> None:
    """Print how many rows there are."""
    with opened(config) as (_, engine):
        try:
            found = batches.count(engine, question)
        except NotAskedOfError as error:
            fail(str(error), status=2)
    if as_json:
        print_json({"count": found})
    else:
        print(found)


def show(config: Path, question: Question, way: Way) -> None:
    """Print the rows, or write them."""
    with opened(config) as (_, engine):
        try:
            batches.check(question)
        except NotAskedOfError as error:
            fail(str(error), status=2)
        if way.format is Format.TABLE:
            _table(engine, question, way)
            return
        try:
            written = _written(engine, question, way)
        except MissingExtraError as error:
            fail(str(error), status=2)
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0) from None
        except OSError as error:
            fail(why(error, way.out or Path("standard output")), status=1)
    if way.out is not None:
        console.print(f"{way.out}: {written:,} {question.rows.name}", markup=False)


def _table(engine: Engine, question: Question, way: Way) -> None:
    if question.limit is None or question.limit > MOST_IN_A_TABLE:
        fail(f"a table has at most {MOST_IN_A_TABLE} rows: lower --limit, or write --csv", status=2)
    found = [row for batch in batches.answer(engine, question) for row in batch]
    if not found:
        console.print(f"{question.rows.name.capitalize()}: none{_about_patterns(question)}", markup=False)
        return
    print_rows(_title(question, len(found)), question.columns, found, all_columns=way.columns_named)


def _about_patterns(question: Question) -> str:
    values = [value for several in question.filters.equal.values() for value in several]
    has_pattern = any(isinstance(value, str) and ("*" in value or "?" in value) for value in values)
    return " (patterns are not understood: values are compared whole)" if has_pattern else ""


def _title(question: Question, found: int) -> str:
    name = question.rows.name.capitalize()
    if found != question.limit:
        return f"{name}: {found}"
    order = f"first {found} by {question.order}" if question.sorted_by else f"{question.order} {found}"
    return f"{name}: the {order} (--limit for more)"


def _written(engine: Engine, question: Question, way: Way) -> int:
    """Write all rows; how many there were."""
    rows = 0
    with ExitStack() as stack:
        if way.out is None:
            writer = _text_writer(way.format, sys.stdout, question.columns)
        else:
            leave_cleanly()
            part = stack.enter_context(replacing(way.out, MODE))
            if way.format is Format.PARQUET:
                writer = Parquet(part, question.columns, [question.rows.kind(name) for name in question.columns])
            else:
                file = stack.enter_context(part.open("w", encoding="utf-8", newline=""))
                writer = _text_writer(way.format, file, question.columns)
        for batch in batches.answer(engine, question):
            writer.add(batch)
            rows += len(batch)
        writer.end()
        sys.stdout.flush()
    return rows


def _text_writer(wanted: Format, file: TextIO, names: Sequence[str]) -> Writer:
    match wanted:
        case Format.CSV:
            return Csv(file, names)
        case Format.JSON_LINES:
            return JsonLines(file, names)
        case _:
            return Json(file, names)
