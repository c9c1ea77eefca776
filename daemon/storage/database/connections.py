"""Connections to the results database: what SQLite needs to be told. What PostgreSQL does: postgresql.py."""

import os
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, unquote

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from daemon.errors import MissingExtraError
from daemon.host.folders import make_folder

FILE_MODE = 0o640


class StoreError(Exception):
    """The database cannot be used; the text says what to do."""


def sqlite_path(url: str | URL) -> Path | None:
    """The file behind a SQLite URL, None for another database."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    if not parsed.database or parsed.database == ":memory:":
        raise StoreError("expected a file, for example sqlite:///inspection.db: results in memory would be lost")
    return Path(unquote(parsed.database.removeprefix("file:")))  # with the prefix it is the reader's own URL


def server_hosts(url: str) -> list[str]:
    """The machines that serve a database; none for a file, or for a server behind a Unix socket."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return []
    named = parsed.normalized_query.get("host", ())
    hosts = [host for text in (parsed.host or "", *named) for host in text.split(",")]
    return [host for host in hosts if host and not host.startswith("/")]


def shown(url: str | URL) -> str:
    """`url` as people and files may see it: without a password."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return str(url)
    return parsed.difference_update_query(["password"]).render_as_string()


def open_for_writing(url: str, busy_timeout_ms: int) -> Engine:
    """The writer's engine: one connection, durable commits, foreign keys enforced. Makes a file that is missing."""
    path = sqlite_path(url)
    if path is None:
        return _postgresql().writing(url, busy_timeout_ms)
    _make_file(path)
    engine = create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})

    @event.listens_for(engine, "connect")
    def configure(connection: object, _entry: ConnectionPoolEntry) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.isolation_level = None  # type: ignore[attr-defined]  # BEGIN is ours, below
        cursor = connection.cursor()  # type: ignore[attr-defined]
        cursor.execute(f"PRAGMA busy_timeout = {busy_timeout_ms:d}")
        if cursor.execute("PRAGMA page_count").fetchone() == (0,):
            cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has effect only before the first table
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection) -> None:  # pyright: ignore
        # A transaction that will write takes its lock at once: upgrading later may fail without waiting.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def open_for_reading(url: str) -> Engine:
    """An engine that cannot write; each transaction sees one state of the database."""
    path = sqlite_path(url)
    if path is None:
        return _postgresql().reading(url)
    if not path.exists():
        raise StoreError(f"there is no database at {path}: start the daemon once, or check `database` in coserve.yaml")
    read_only = make_url(url).set(database=f"file:{quote(str(path))}", query={"mode": "ro", "uri": "true"})
    engine = create_engine(read_only)

    @event.listens_for(engine, "connect")
    def configure(connection, _entry: ConnectionPoolEntry) -> None:  # pyright: ignore
        connection.isolation_level = None
        connection.execute("PRAGMA busy_timeout = 2000")

    @event.listens_for(engine, "begin")
    def begin(connection) -> None:  # pyright: ignore
        connection.exec_driver_sql("BEGIN")

    return engine


def server(url: str) -> Any:
    """Who serves a database that is no file, as a `daemon.storage.database_place.Place`."""
    return _postgresql().Server(url)


def _postgresql() -> ModuleType:
    try:
        from daemon.storage.database import postgresql  # noqa: PLC0415 - of the extra `postgresql`
    except ImportError as missing:  # of the package, or of libpq
        raise StoreError(str(MissingExtraError(missing.name, "this database", "postgresql"))) from None
    return postgresql


def _make_file(path: Path) -> None:
    """An empty file with its mode, before SQLite makes one with the umask's; -wal and -shm take the mode after it."""
    make_folder(path.parent)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    except FileExistsError:
        return
    os.fchmod(fd, FILE_MODE)
    os.close(fd)
