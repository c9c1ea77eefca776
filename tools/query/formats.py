"""Rows as files: CSV for people, JSON and JSON lines for programs, Parquet for notebooks. Each takes batch by batch."""

import csv
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from daemon.errors import MissingExtraError
from daemon.units import spreadsheet_cell
from tools.query.batches import Batch
from tools.query.rows import Kind


class Writer(Protocol):
    """Takes rows until `end`."""

    def add(self, batch: Batch) -> None: ...
    def end(self) -> None: ...


class Csv:
    """A header and rows; an empty cell is a null."""

    def __init__(self, file: TextIO, names: Sequence[str]) -> None:
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow(names)

    def add(self, batch: Batch) -> None:
        self._writer.writerows([spreadsheet_cell(value) for value in row] for row in batch)

    def end(self) -> None:
        pass


class JsonLines:
    """One object a line, as the database has it."""

    def __init__(self, file: TextIO, names: Sequence[str]) -> None:
        self._file, self._names = file, names

    def add(self, batch: Batch) -> None:
        self._file.writelines(
            json.dumps(dict(zip(self._names, row, strict=True)), ensure_ascii=False) + "\n" for row in batch
        )

    def end(self) -> None:
        pass


class Json:
    """One list of objects."""

    def __init__(self, file: TextIO, names: Sequence[str]) -> None:
        self._file, self._names = file, names
        self._is_empty = True

    def add(self, batch: Batch) -> None:
        for row in batch:
            text = json.dumps(dict(zip(self._names, row, strict=True)), indent=2, ensure_ascii=False)
            self._file.write(("[\n  " if self._is_empty else ",\n  ") + text.replace("\n", "\n  "))
            self._is_empty = False

    def end(self) -> None:
        self._file.write("[]\n" if self._is_empty else "\n]\n")


class Parquet:
    """Typed columns: times are UTC timestamps to the millisecond."""

    def __init__(self, path: Path, names: Sequence[str], kinds: Sequence[Kind]) -> None:
        """Raises MissingExtraError without pyarrow."""
        try:
            import pyarrow as pa
            from pyarrow.parquet import ParquetWriter
        except ImportError:
            raise MissingExtraError("pyarrow", "Parquet", "export") from None
        self._arrow, self._kinds = pa, kinds
        types = {
            "text": pa.string(),
            "int": pa.int64(),
            "real": pa.float64(),
            "time": pa.timestamp("ms", tz="UTC"),
        }
        self._schema = pa.schema([(name, types[kind]) for name, kind in zip(names, kinds, strict=True)])
        self._writer: Any = ParquetWriter(path, self._schema)

    def add(self, batch: Batch) -> None:
        columns: Iterable[Sequence[Any]] = zip(*batch, strict=True) if batch else [[] for _ in self._kinds]
        arrays = [
            self._arrow.array([_moment(value) for value in values] if kind == "time" else values, field.type)
            for values, kind, field in zip(columns, self._kinds, self._schema, strict=True)
        ]
        self._writer.write_batch(self._arrow.record_batch(arrays, schema=self._schema))

    def end(self) -> None:
        self._writer.close()


def _moment(value: str | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value)
