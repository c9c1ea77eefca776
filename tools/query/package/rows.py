"""Rows of a package beside each other in all formats, and beside the database of today (`export --verify`)."""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select, tuple_

from daemon.storage.database.schema import metadata
from daemon.units import spreadsheet_cell
from tools.query.reading import Row

_ROWS_PER_QUERY = 500
#: The column that has this value while a row may still change.
_UNFINISHED = {
    "boards": ("verdict", None),
    "inspections": ("status", "accepted"),
    "generations": ("status", "accepted"),
    "runs": ("ended_at", None),
}
#: Columns that change later: pictures are pruned, late images add attributes.
_CHANGING = {("inspections", "image_path"), ("boards", "attributes")}


def format_problems(rows: Path, counts: Mapping[str, int]) -> Iterator[str]:
    """Compare the JSON lines with CSV, with Parquet if pyarrow is there, and with the manifest's numbers of rows."""
    csv.field_size_limit(sys.maxsize)
    for table, count in counts.items():
        lines = rows / f"{table}.jsonl"
        number = sum(1 for _ in _json_rows(lines))
        if number != count:
            yield f"rows/{lines.name} has {number} rows, the manifest says {count}"
        yield from _difference(lines, rows / f"{table}.csv", _csv_rows, lambda cell, value: cell == _csv_cell(value))
        if (rows / f"{table}.parquet").exists():
            yield from _difference(lines, rows / f"{table}.parquet", _parquet_rows, _is_same)


def _difference(
    lines: Path, other: Path, read: Callable[[Path], Iterator[Row]], is_same: Callable[[Any, Any], bool]
) -> Iterator[str]:
    """Yield the first difference of two files."""
    for number, (row, twin) in enumerate(zip_longest(_json_rows(lines), read(other)), 1):
        if row is None or twin is None:
            yield f"row {number} is only in rows/{(other if row is None else lines).name}"
            return
        for column in row.keys() | twin.keys():
            if column not in row or column not in twin or not is_same(twin[column], row[column]):
                what = f"row {number} ({next(iter(row.values()))}), {column}"
                yield f"{what}: {twin.get(column)} in rows/{other.name}, {row.get(column)} in rows/{lines.name}"
                return


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _csv_cell(value: Any) -> str:
    return "" if value is None else str(spreadsheet_cell(value))


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:  # the files' checksums hold, and this PC cannot read them
        yield from _json_rows(path.with_suffix(".jsonl"))
        return
    with ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def _is_same(cell: Any, value: Any) -> bool:
    if isinstance(cell, datetime) and isinstance(value, str):  # Parquet has milliseconds
        return abs(cell - datetime.fromisoformat(value)) < timedelta(milliseconds=1)
    return cell == value


def database_problems(connection: Connection, rows: Path, counts: Mapping[str, int]) -> Iterator[str]:
    """Compare finished rows of a package with the database: what was changed or deleted since, by table and key."""
    for name in counts.keys() & metadata.tables.keys():
        table = metadata.tables[name]
        keys = [column.name for column in table.primary_key.columns]
        lines = _json_rows(rows / f"{name}.jsonl")
        while part := list(islice(lines, _ROWS_PER_QUERY)):
            is_one = tuple_(*table.primary_key.columns).in_([tuple(row[key] for key in keys) for row in part])
            found = connection.execute(select(table).where(is_one)).mappings()
            today = {tuple(row[key] for key in keys): row for row in found}
            for row in part:
                key = tuple(row[key] for key in keys)
                what = f"{name} {' '.join(map(str, key))}"
                if key not in today:
                    yield f"{what}: not in the database any more (pruned, or deleted)"
                    continue
                column, value = _UNFINISHED.get(name, (keys[0], None))
                if row[column] == value:
                    continue
                for column, value in row.items():
                    if (name, column) not in _CHANGING and column in today[key] and today[key][column] != value:
                        yield f"{what}: {column} is {today[key][column]} in the database, {value} in the package"
