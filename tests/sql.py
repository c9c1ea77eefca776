"""Rows of a results database, read and changed by a test as a person with `sqlite3` would."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def sql(place: Path, *statements: str, values: Any = ()) -> list[tuple[Any, ...]]:
    """Execute `statements`, the last with `values`, in a line's folder or a database; return the last one's rows."""
    path = place / "inspection.db" if place.is_dir() else place
    rows: list[tuple[Any, ...]] = []
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            rows = database.execute(statement, values if statement is statements[-1] else ()).fetchall()
    return rows
