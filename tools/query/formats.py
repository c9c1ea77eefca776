"""Rows as files: CSV for people, JSON and JSON lines for programs, Parquet for notebooks."""

import csv
import errno
import json
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from daemon.errors import MissingExtraError
from daemon.units import spreadsheet_cell
from tools.query.reading import Batch
from tools.query.rows import ColumnType
from tools.terminal.console import fail

#: The mode of the database: others read through the group.
FILE_MODE = 0o640


class RowWriter:
    """Takes batches of rows until `end`."""

    def add(self, batch: Batch) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Finish the file."""


class CsvWriter(RowWriter):
    """A header and rows; an empty cell is a null."""

    def __init__(self, file: TextIO, names: Sequence[str]) -> None:
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow(names)

    def add(self, batch: Batch) -> None:
        self._writer.writerows([spreadsheet_cell(value) for value in row] for row in batch)


class JsonLinesWriter(RowWriter):
    def __init__(self, file: TextIO, names: Sequence[str]) -> None:
        self._file, self._names = file, names

    def add(self, batch: Batch) -> None:
        for row in batch:
            self._file.write(json.dumps(dict(zip(self._names, row, strict=True)), ensure_ascii=False) + "\n")


class JsonWriter(JsonLinesWriter):
    _before = "[\n  "

    def add(self, batch: Batch) -> None:
        for row in batch:
            text = json.dumps(dict(zip(self._names, row, strict=True)), indent=2, ensure_ascii=False)
            self._file.write(self._before + text.replace("\n", "\n  "))
            self._before = ",\n  "

    def end(self) -> None:
        self._file.write("\n]\n" if self._before.startswith(",") else "[]\n")


TEXT_WRITERS = {"csv": CsvWriter, "jsonl": JsonLinesWriter, "json": JsonWriter}


class ParquetFile(RowWriter):
    """Typed columns: times are UTC timestamps to the millisecond."""

    def __init__(self, path: Path, names: Sequence[str], types: Sequence[ColumnType]) -> None:
        """Raises MissingExtraError without pyarrow."""
        try:
            import pyarrow as pa
            from pyarrow.parquet import ParquetWriter
        except ImportError:
            raise MissingExtraError("pyarrow", "Parquet", "export") from None
        self._arrow, self._types = pa, types
        arrow_types = {
            "text": pa.string(),
            "int": pa.int64(),
            "real": pa.float64(),
            "time": pa.timestamp("ms", tz="UTC"),
        }
        self._schema = pa.schema([(name, arrow_types[kind]) for name, kind in zip(names, types, strict=True)])
        self._writer: Any = ParquetWriter(path, self._schema)

    def add(self, batch: Batch) -> None:
        columns: Iterable[Sequence[Any]] = zip(*batch, strict=True) if batch else [[] for _ in self._types]
        arrays = [
            self._arrow.array([_timestamp(value) for value in values] if kind == "time" else values, field.type)
            for values, kind, field in zip(columns, self._types, self._schema, strict=True)
        ]
        self._writer.write_batch(self._arrow.record_batch(arrays, schema=self._schema))

    def end(self) -> None:
        self._writer.close()


def _timestamp(value: str | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value)


@contextmanager
def os_errors_end(path: Path) -> Iterator[None]:
    """End the command on an OSError. A full disk names `path`, which was written, not a file that was read."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            fail(f"{path}: {error.strerror}; make room, or name another disk", status=1)
        fail(f"{error.filename or path}: {error.strerror or error}", status=1)


def clean_up_on_signals() -> None:
    """End the command on SIGTERM or with its terminal as on Ctrl-C: delete unfinished files, stop what it started."""
    signal.signal(signal.SIGTERM, lambda *_: fail("stopped by SIGTERM", status=1))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, lambda *_: fail("stopped by SIGHUP", status=1))
