"""Connections to the results database: URLs, SQLite's settings, time limits of queries (also those of the hub).

The statements of the hot path are compiled once and handed to SQLite's driver as text: SQLAlchemy's own way costs 60 µs
a query and 5 µs a row more (measured), most of it under the interpreter's lock.
"""

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Executable,
    bindparam,
    create_engine,
    event,
    func,
    select,
    text,
)
from sqlalchemy.dialects.sqlite import pysqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from daemon.host.folders import make_folder

FILE_MODE = 0o640
#: SQLite checks the time limit after this many steps of its virtual machine: about a millisecond.
_STEPS_PER_LOOK = 20_000
#: Compiled statements that the writer keeps: of some ten kinds, each for up to eleven numbers of rows.
_STATEMENTS = 256
#: BEGIN is ours, below.
_NO_BEGIN = {"isolation_level": None}
DIALECT = pysqlite.dialect()


class StoreError(Exception):
    """The database cannot be used; the text says what to do."""


class QueryTimeoutError(Exception):
    """A query was broken off because its time was up."""


def sqlite_path(url: str | URL) -> Path:
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        raise StoreError("expected a file, for example sqlite:///inspection.db: results in memory would be lost")
    return Path(unquote(parsed.database.removeprefix("file:")))  # with the prefix it is the reader's own URL


def open_for_writing(url: str, busy_timeout_ms: int) -> Engine:
    """Open the writer's engine: one connection, durable commits, foreign keys enforced. Makes a missing file."""
    _make_file(sqlite_path(url))
    arguments = {"check_same_thread": False, "cached_statements": _STATEMENTS, "timeout": busy_timeout_ms / 1000}
    engine = create_engine(url, poolclass=StaticPool, connect_args=arguments | _NO_BEGIN)

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:  # pyright: ignore[reportUnusedFunction]
        if connection.execute("PRAGMA page_count").fetchone() == (0,):
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has effect only before the first table
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    # A transaction that will write takes its lock at once: upgrading later may fail without waiting.
    _begin_with(engine, "BEGIN IMMEDIATE")
    return engine


def open_for_reading(url: str) -> Engine:
    """Open an engine that cannot write; each transaction sees one state of the database."""
    path = sqlite_path(url)
    if not path.exists():
        raise StoreError(f"there is no database at {path}: start the daemon once, or check `database` in coserve.yaml")
    read_only = make_url(url).set(database=f"file:{quote(str(path))}", query={"mode": "ro", "uri": "true"})
    engine = create_engine(read_only, connect_args={"timeout": 2.0} | _NO_BEGIN)
    _begin_with(engine, "BEGIN")
    return engine


def driver_of(connection: Connection) -> sqlite3.Connection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


@contextmanager
def query_timeout(connection: Connection, seconds: float) -> Iterator[None]:
    if connection.dialect.name == "sqlite":
        driver = driver_of(connection)
        until_s = time.monotonic() + seconds
        driver.set_progress_handler(lambda: time.monotonic() > until_s, _STEPS_PER_LOOK)
    else:
        driver = None
        connection.execute(text(f"SET LOCAL statement_timeout = {round(seconds * 1000):d}"))
    try:
        yield
    except DBAPIError as error:
        code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorcode", None)
        if code in {"57014", sqlite3.SQLITE_INTERRUPT}:  # PostgreSQL's query_canceled
            raise QueryTimeoutError from None
        raise
    finally:
        if driver is not None:
            driver.set_progress_handler(None, 0)


def _begin_with(engine: Engine, statement: str) -> None:
    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        if not driver_of(connection).in_transaction:  # the writer begins its own with the driver
            connection.exec_driver_sql(statement)


def _make_file(path: Path) -> None:
    """Make an empty file with our mode, before SQLite uses the umask's; -wal and -shm get the same."""
    make_folder(path.parent)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    except FileExistsError:
        return
    os.fchmod(fd, FILE_MODE)
    os.close(fd)


class Prepared:
    """A statement as text; call it with SQLite's connection and its named parameters."""

    def __init__(self, statement: Executable) -> None:
        compiled: Any = statement.compile(dialect=DIALECT)  # type: ignore[attr-defined]  # every statement has it
        self._sql = str(compiled)
        self._names: Sequence[str] = compiled.positiontup
        self._fixed: dict[str, Any] = compiled.params  # literal values of the statement itself

    def __call__(self, sql: sqlite3.Connection, **values: Any) -> sqlite3.Cursor:
        return sql.execute(self._sql, [values[name] if name in values else self._fixed[name] for name in self._names])


def among(column: ColumnElement[int]) -> ColumnElement[bool]:
    """Return the condition that `column` is in the parameter `ids`, a JSON list: one statement for any number."""
    return column.in_(select(func.json_each(bindparam("ids")).table_valued("value").c.value))
