"""Watch the database's files under a running line, and check that a log belongs to its database.

SQLite goes on writing into a file that was deleted or moved away, and the file ends with the process. So a thread
checks the names once a second. If one is lost, no image is taken until it is back or the line is stopped; an orderly
stop makes a copy of what the line wrote.
"""

import os
import secrets
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import structlog
from sqlalchemy import Engine

from daemon.storage.database.migrate import Tell
from daemon.storage.database.upkeep import APPLICATION_ID, copy_connection
from experts.durable import replace_durably, sync

#: Time limit of a check: a start after a kill makes one, and a second if the first finds damage.
_SOUND_CHECK_S = 5.0


class DatabaseFiles:
    """The files of one database: `put_foreign_log_aside` before it is opened, `note` after; then poll `problem`.

    Each run writes a random number into the file's header and into `inspection.db.id`; copies that CoServe makes have
    none. If they differ, the log beside the file belongs to another database, or to a later state of this one.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._logs = [database.with_name(database.name + suffix) for suffix in ("-wal", "-shm")]
        self._ids = database.with_name(database.name + ".id")
        self._numbers: list[str] = []
        self._known: dict[Path, os.stat_result] = {}
        self._log = structlog.get_logger("database")

    def put_foreign_log_aside(self) -> None:
        """Rename a log that does not belong to what lies at the database's place."""
        self._numbers = self._ids.read_text().split() if self._ids.exists() else []
        number = str(_number_in(self._database)) if self._database.exists() else None
        is_known = number is not None and (not self._numbers or number in self._numbers)
        is_own = is_known and not self._log_contradicts()
        for log in self._logs if not is_own else ():
            if log.exists():
                aside = log.with_name(f"{log.name}.aside-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
                log.rename(aside)
                sync(log.parent)
                advice = f"it does not belong to what lies at {self._database} now: delete it once nothing is missing"
                self._log.error("database_file_put_aside", file=str(log), aside=str(aside), advice=advice)
        self._numbers += [number] if number is not None else []

    def note(self, engine: Engine) -> None:
        """Remember the files of the open database, and write this run's number into it."""
        with engine.connect() as connection:
            self._connection: Any = connection.connection.driver_connection
        number = secrets.randbits(31)
        try:
            # Until a checkpoint the header in the file still has the old number: keep both.
            self._keep_numbers(*self._numbers, str(number))
            self._connection.execute(f"PRAGMA application_id = {number:d}")
            # Do not open the file here: closing it would release the process's POSIX locks, SQLite's among them, and
            # the next program to close the database would delete the log that we write.
            ((is_busy, *_),) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if not is_busy:
                self._keep_numbers(str(number))
        except (OSError, sqlite3.Error) as error:
            self._log.warning("database_not_numbered", file=str(self._database), error=str(error))
        self._known = {file: file.stat() for file in (self._database, *self._logs) if file.exists()}

    def problem(self) -> str | None:
        """Name the file that is gone and the remedy; None if all are in place."""
        for file, known in self._known.items():
            if not _is_at(file, known):
                return (
                    f"{file} was deleted, moved or replaced under the running line: put it back, or stop the daemon in"
                    " order, which makes a copy of what it wrote"
                )
        return None

    def copy_if_lost(self, tell: Tell = lambda _: None) -> None:
        """If the database is gone, copy what the line wrote into its place, or beside it if another file is there.

        `tell` gets the progress, so that a supervisor grants the time.
        """
        known = self._known.get(self._database)
        if known is None or _is_at(self._database, known):
            return
        taken = self._database.with_name(f"{self._database.name}.saved-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
        copy = taken if self._database.exists() else self._database
        told_at_s = 0.0

        def tell_each_second(done: int, total: int) -> None:
            nonlocal told_at_s
            if time.monotonic() - told_at_s >= 1.0:
                told_at_s = time.monotonic()
                tell(f"copying the database: {100 * done // total} %")

        try:
            copy_connection(self._connection, copy, tell_each_second)
        except (sqlite3.Error, OSError) as error:
            self._log.error("database_not_saved", copy=str(copy), error=str(error))
        else:
            # The copy has all of their content, and the next start would put them aside as foreign to the database.
            for log in self._logs:
                if log in self._known and _is_at(log, self._known[log]):
                    log.unlink()
            self._log.error("database_saved", file=str(self._database), copy=str(copy))

    def _log_contradicts(self) -> bool:
        """Return True if the database is sound without its log and damaged with it, as far as a short check can tell.

        A copy that another program made of the running line's database has the run's number: its content must tell.
        """
        log = self._logs[0]
        has_log = log.exists() and log.stat().st_size > 0
        return has_log and not _is_sound(self._database) and _is_sound(self._database, "&immutable=1")

    def _keep_numbers(self, *numbers: str) -> None:
        replace_durably(self._ids, " ".join(dict.fromkeys(numbers)), self._database.stat().st_mode & 0o777)


def _number_in(database: Path) -> int:
    """Return the number in the header, 0 of an empty file. Only for a database that this process has not opened."""
    with database.open("rb") as file:
        return int.from_bytes(file.read(APPLICATION_ID.stop)[APPLICATION_ID], "big")


def _is_sound(database: Path, options: str = "") -> bool:
    """Return False if SQLite finds damage within some seconds; with `immutable` it reads no log."""
    until_s = time.monotonic() + _SOUND_CHECK_S
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro{options}", uri=True)) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > until_s, 10_000)
            return connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
    except sqlite3.OperationalError:  # timed out, or opening the database will report the problem
        return True
    except sqlite3.DatabaseError:
        return False


def _is_at(file: Path, known: os.stat_result) -> bool:
    try:
        return os.path.samestat(file.stat(), known)
    except OSError:
        return False
