"""Connections to the results database: URLs, SQLite's settings, time limits of queries (also those of the hub)."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

from sqlalchemy import Connection, Engine, create_engine, event, text
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


@contextmanager
def query_timeout(connection: Connection, seconds: float) -> Iterator[None]:
    if connection.dialect.name == "sqlite":
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
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
