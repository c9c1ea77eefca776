"""The kept databases of released schemas (`dump_schema.py` makes them), put back where a daemon finds them."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

FOLDER = Path(__file__).with_name("schemas")
SCHEMAS = sorted(path.stem for path in FOLDER.glob("*.sql"))

Rows = dict[str, list[tuple[object, ...]]]


def put_back(schema: str, folder: Path) -> Path:
    """The database and the journal of `schema`, as a daemon of that version left them in `folder`."""
    path = folder / "inspection.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA auto_vacuum = INCREMENTAL")
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript((FOLDER / f"{schema}.sql").read_text(encoding="utf-8"))
    journal = folder / "journal"
    journal.mkdir()
    shutil.copy(FOLDER / f"{schema}.journal", journal / "segment-00000001.journal")
    return path


def all_rows(path: Path, like: Rows | None = None) -> Rows:
    """Every row of every table, by its columns; of `like`'s tables and columns only, where that is given.

    The key of a table is its name and its columns: `boards board_id board_type ...`.
    """
    with closing(sqlite3.connect(path)) as database:
        return {key: database.execute(_select(key)).fetchall() for key in like or _keys(database)}


def _keys(database: sqlite3.Connection) -> list[str]:
    named = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
    tables = [name for (name,) in database.execute(named) if name != "alembic_version"]
    return [
        " ".join([table, *(row[1] for row in database.execute(f'PRAGMA table_info("{table}")'))]) for table in tables
    ]


def _select(key: str) -> str:
    table, *columns = key.split()
    named = ", ".join(f'"{column}"' for column in columns)
    return f'SELECT {named} FROM "{table}" ORDER BY rowid'  # noqa: S608 - names of our own tables
