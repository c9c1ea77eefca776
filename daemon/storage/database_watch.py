"""The watch over the database under a running line: its files keep their names, or its server answers.

SQLite goes on writing into a file that was deleted or moved away, and the file ends with the process. So a thread
checks the names once a second. If the database has lost its name, no image is taken any more, and all that was written
is copied to `inspection.db.saved`. The next start goes on with that copy if nothing lies in the database's place.
"""

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from daemon.storage.database.connections import StoreError, open_for_reading, sqlite_path
from daemon.storage.database.upkeep import APPLICATION_ID, copy_connection
from experts.durable import replace_durably, sync

_LOOK_INTERVAL_S = 1.0
_HOLD_CAUSE = "files"
#: A check of a large database ends after so long; a start after a kill makes one, or two if the first finds damage.
_CHECK_S = 5.0


class DatabaseFiles:
    """The files of one SQLite database: `settle` before it is opened, `hold` after; `look` often, then `save`."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._logs = [database.with_name(database.name + suffix) for suffix in ("-wal", "-shm")]
        self._saved = database.with_name(database.name + ".saved")
        #: The numbers that the database file may have while its logs belong to it.
        self._ids = database.with_name(database.name + ".id")
        self._numbers: list[str] = []
        self._known: dict[Path, os.stat_result] = {}
        self._log = structlog.get_logger("database")

    def settle(self) -> None:
        """Put the saved copy in an empty place; put aside logs of another database, and a copy that is not needed."""
        database, saved = self._database, self._saved
        is_gone = not database.exists()
        self._numbers = self._ids.read_text().split() if self._ids.exists() else []
        if is_gone or (self._numbers and str(_id_of(database)) not in self._numbers) or self._log_contradicts():
            self._put_aside(self._logs)
        if saved.exists() and is_gone:
            saved.replace(database)
            sync(database.parent)
            advice = "it was gone, and a copy was saved; to begin anew stop this daemon, then delete it"
            self._log.error("database_put_back", file=str(database), advice=advice)
        self._put_aside([saved])
        self._numbers += [str(_id_of(database))] if database.exists() else []

    def hold(self, engine: Engine) -> None:
        """Note the files of the open database, and give it a number by which the next start knows it again."""
        with engine.connect() as connection:
            self._connection: Any = connection.connection.driver_connection
        number = secrets.randbits(31)
        try:
            numbers = " ".join(dict.fromkeys((*self._numbers, str(number))))
            replace_durably(self._ids, numbers, self._database.stat().st_mode & 0o777)
            self._connection.execute(f"PRAGMA application_id = {number:d}")
            # The file itself is not read here: closing it would release SQLite's locks, which are the process's, and
            # then the next program that closes the database deletes the log that this one writes.
            ((is_busy, *_),) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if not is_busy:
                replace_durably(self._ids, str(number), self._database.stat().st_mode & 0o777)
        except (OSError, sqlite3.Error) as error:
            self._log.warning("database_not_numbered", file=str(self._database), error=str(error))
        self._known = {file: file.stat() for file in (self._database, *self._logs) if file.exists()}

    def look(self) -> str | None:
        """Return what happened to the files and what a person has to do, None if all is well."""
        lost = [file for file, known in self._known.items() if not _is_at(file, known)]
        if not lost:
            return None
        file = lost[0]
        if file != self._database:
            return f"{file} was deleted, moved or replaced under the running line: put it back or restart the daemon"
        if file.exists():
            return (
                f"another file took the place of {file}: what the line wrote is copied to {self._saved}; restart the"
                " daemon to use the other file, or move that away first to go on with the copy"
            )
        return (
            f"{file} was deleted or moved under the running line: put it back, or restart the daemon, which goes on"
            f" with the copy {self._saved}"
        )

    def save(self) -> None:
        """Copy what the line has written, if the database's name is lost; any thread. Remove the copy otherwise."""
        known = self._known.get(self._database)
        if known is None:
            return
        if _is_at(self._database, known):
            self._saved.unlink(missing_ok=True)
            return
        try:
            copy_connection(self._connection, self._saved)
        except StoreError as error:
            self._log.error("database_not_saved", error=str(error))
        else:
            self._log.error("database_saved", file=str(self._database), copy=str(self._saved))

    def _log_contradicts(self) -> bool:
        """Return True if the database is sound without its log and damaged with it, as far as that is soon known.

        A copy that another program made while the same run wrote has the run's number.
        """
        has_log = self._logs[0].exists() and self._logs[0].stat().st_size > 0
        return has_log and not _is_sound(self._database) and _is_sound(self._database, "&immutable=1")

    def _put_aside(self, files: list[Path]) -> None:
        for file in [file for file in files if file.exists()]:
            aside = file.with_name(f"{file.name}.aside-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
            file.rename(aside)
            sync(file.parent)
            advice = f"it does not belong to what lies at {self._database} now: delete it once nothing is missing"
            self._log.error("database_file_put_aside", file=str(file), aside=str(aside), advice=advice)


class DatabaseServer:
    """Watch for a database on a server, which minds its own files: only checks that the server answers."""

    def __init__(self, url: str) -> None:
        self._engine = open_for_reading(url)

    def settle(self) -> None:
        """Do nothing: the server minds its files."""

    def save(self) -> None:
        """Close the connections: the server keeps what was written."""
        self._engine.dispose()

    def hold(self, engine: Engine) -> None:
        """Do nothing, too."""

    def look(self) -> str | None:
        """Return why no image can be taken now, None if one can."""
        try:
            self._engine.connect().close()  # a connection pings its server
        except SQLAlchemyError as error:
            return f"the database does not answer: {' '.join(str(getattr(error, 'orig', error)).split())}"
        return None


def watched_database(url: str) -> DatabaseFiles | DatabaseServer:
    """Return what there is to watch of the database at `url`."""
    path = sqlite_path(url)
    return DatabaseServer(url) if path is None else DatabaseFiles(path)


class DatabaseWatch:
    """A thread that looks once a second. A problem holds images out, with state `degraded`, until it is solved."""

    def __init__(
        self, database: DatabaseFiles | DatabaseServer, hold: Callable[[str, str], None], resume: Callable[[str], None]
    ) -> None:
        """`hold(cause, problem)` keeps images out until `resume(cause)`."""
        self._database = database
        self._hold, self._resume = hold, resume
        self._stopping = threading.Event()
        self._problem: str | None = None
        self._log = structlog.get_logger("database")
        self._thread = threading.Thread(target=self._run, name="database-watch")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._look()
            self._database.save()

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_INTERVAL_S):
            try:
                self._look()
            except Exception:  # noqa: BLE001 - the next look may fare better
                self._log.exception("database_watch_failed")

    def _look(self) -> None:
        problem = self._database.look()
        if problem == self._problem:
            return
        self._problem = problem
        if problem is None:
            self._resume(_HOLD_CAUSE)
            self._log.info("database_usable_again")
        else:
            self._hold(_HOLD_CAUSE, problem)
            self._log.error("database_unusable", problem=problem)
        self._database.save()


def _id_of(database: Path) -> int:
    """Return the number in the header of a database file that this process has not open; 0 of an empty file."""
    with database.open("rb") as file:
        return int.from_bytes(file.read(APPLICATION_ID.stop)[APPLICATION_ID], "big")


def _is_sound(database: Path, options: str = "") -> bool:
    """Return False if SQLite finds damage within a few seconds; with `immutable` it reads no log."""
    until_s = time.monotonic() + _CHECK_S
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro{options}", uri=True)) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > until_s, 10_000)
            return connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
    except sqlite3.OperationalError:  # the time is over, or the start will say what is wrong
        return True
    except sqlite3.DatabaseError:
        return False


def _is_at(file: Path, known: os.stat_result) -> bool:
    try:
        return os.path.samestat(file.stat(), known)
    except OSError:
        return False
