"""Upkeep of the database file while the line runs: the write-ahead log, free pages, the planner's statistics.

What may take long runs on a connection of its own, beside the writer; what needs the writer is a step of milliseconds.
Other databases than SQLite look after themselves: nothing is done there.
"""

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Engine

from daemon.storage.database.connections import StoreError, sqlite_path

#: A log begins anew when it has this many pages: 4 MiB.
_LOG_PAGES = 1000
#: A log with so many pages that cannot be copied is held up by a reader that does not end: 400 MiB.
_HELD_PAGES = 100_000
#: What is left for the writer after a checkpoint beside it: a few milliseconds.
_REST_PAGES = 500
#: The log's file shrinks to this when it begins anew; it keeps some room for a disk that is full.
_LOG_FILE_BYTES = 16 * 2**20
_LOG_PART_BYTES = 2**20
_VACUUM_PAGES = 32
#: Free pages are used again by new rows: a file is made smaller only where a good part of it is free.
_FREE_SHARE = 8
_FREE_PAGES = 4096
#: How many rows of an index `optimize` looks at: enough for the planner, milliseconds for the writer.
_ANALYSIS_ROWS = 400


@dataclass(frozen=True, slots=True)
class Log:
    """The write-ahead log after a checkpoint: its pages, and how many of them are in the database file."""

    pages: int
    done: int
    file_bytes: int


class Checkpoints:
    """Checkpoints on a connection of their own, from one thread: commits go on meanwhile."""

    def __init__(self, url: str) -> None:
        """StoreError where the database cannot be opened."""
        self._path = sqlite_path(url)
        self._connection: sqlite3.Connection | None = None
        if self._path is not None:
            try:
                name = f"file:{quote(str(self._path))}?mode=rw"
                self._connection = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
            except sqlite3.Error as error:
                raise StoreError(f"cannot open {self._path} for its upkeep: {error}") from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def log_file_bytes(self) -> int:
        """How large the write-ahead log's file is."""
        return 0 if self._path is None else _size(self._path.with_name(self._path.name + "-wal"))

    def checkpoint(self) -> Log:
        """Copy what no reader holds back into the database file; OSError or sqlite3.Error where that fails."""
        if self._connection is None:
            return Log(0, 0, 0)
        _, pages, done = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return Log(max(0, pages), max(0, done), self.log_file_bytes())

    def vacuum_is_due(self) -> bool:
        """Whether so much of the file is free that it should shrink."""
        if self._connection is None:
            return False
        free_pages, pages = (self._ask("freelist_count"), self._ask("page_count"))
        return free_pages > _FREE_PAGES and free_pages * _FREE_SHARE > pages

    def _ask(self, pragma: str) -> int:
        assert self._connection is not None
        return self._connection.execute(f"PRAGMA {pragma}").fetchone()[0]


def leave_checkpoints_to(engine: Engine) -> None:
    """The writer's commits copy no pages any more: a log that a reader had held up would be copied in one of them."""
    _run(engine, "PRAGMA wal_autocheckpoint = 0", f"PRAGMA journal_size_limit = {_LOG_FILE_BYTES:d}")


def write_log_again(engine: Engine) -> None:
    """Write the log's bytes once more, and sync them; OSError or SQLAlchemyError where that fails.

    After a sync that failed the kernel holds them for written, and a restart finds commits that a power cut would
    take: from the log, and not from a database file that they were copied into.
    """
    path = sqlite_path(engine.url) if engine.dialect.name == "sqlite" else None
    if path is None:
        return
    with engine.begin(), path.with_name(path.name + "-wal").open("r+b") as log:  # nobody else writes meanwhile
        while part := log.read(_LOG_PART_BYTES):
            log.seek(-len(part), os.SEEK_CUR)
            log.write(part)
        log.flush()
        os.fdatasync(log.fileno())


def finish_checkpoint(engine: Engine) -> None:
    """Copy the last pages in the writer's thread, where none can be added: the next commit begins the log anew."""
    _run(engine, "PRAGMA wal_checkpoint(PASSIVE)")


def is_nearly_done(log: Log) -> bool:
    """Whether the log should begin anew, and the rest is small enough for the writer."""
    return log.pages >= _LOG_PAGES and log.pages - log.done <= _REST_PAGES


def is_held(log: Log) -> bool:
    """Whether somebody's long query keeps the log from beginning anew: it grows for as long as that lasts."""
    return log.pages - log.done > _HELD_PAGES


def vacuum_step(engine: Engine) -> None:
    """Give some free pages back to the file system."""
    _run(engine, f"PRAGMA incremental_vacuum({_VACUUM_PAGES:d})")


def vacuum(engine: Engine) -> None:
    """Give all free pages back: for a database that nobody else uses."""
    _run(engine, "PRAGMA incremental_vacuum")


def optimize(engine: Engine) -> None:
    """Statistics for the planner, from a sample."""
    _run(engine, f"PRAGMA analysis_limit = {_ANALYSIS_ROWS:d}", "PRAGMA optimize")


def _run(engine: Engine, *statements: str) -> None:
    """Outside of a transaction. As a script: `execute` stops `incremental_vacuum` after its first page."""
    if engine.dialect.name != "sqlite":
        return
    connection = engine.raw_connection()
    try:
        with closing(connection.cursor()) as cursor:
            cursor.executescript(";".join(statements))  # type: ignore[attr-defined]  # sqlite3.Cursor
    finally:
        connection.close()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
