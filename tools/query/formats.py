"""Rows as files: CSV for people, JSON and JSON lines for programs, Parquet for notebooks."""

import csv
import json
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from daemon.errors import MissingExtraError
from daemon.units import spreadsheet_cell
from tools.query.reading import Batch
from tools.query.rows import ColumnType
from tools.terminal.console import fail

#: The mode of the database: others read through the group.
FILE_MODE = 0o640
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
