"""The watch over the database under a running line: its files keep their names, or its server answers.

SQLite goes on writing into a file that was deleted or moved away, and the file ends with the process. So each file of
the database has a hard link beside it while the daemon runs (`.inspection.db.held-INODE`). Once a second a thread gives
a lost file its name back; after a crash the next start does. A copy of a running line's folder has these links too, as
files with other inodes: they are the other line's results, and are put aside.
"""

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import structlog
from sqlalchemy.exc import SQLAlchemyError

from daemon.storage.database.connections import open_for_reading, sqlite_path
from experts.durable import sync

_LOOK_INTERVAL_S = 1.0
_HOLD_CAUSE = "files"
_SUFFIXES = ("", "-wal", "-shm")
_WHILE_IT_RUNS = "it was deleted or moved while the daemon runs: stop the daemon first"


class DatabaseFiles:
    """The files of one SQLite database: `settle` before it is opened, `hold` after, `look` often, `release` at last."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._files = [database.with_name(database.name + suffix) for suffix in _SUFFIXES]
        self._held: dict[Path, os.stat_result] = {}
        self._log = structlog.get_logger("database")

    def settle(self) -> None:
        """Settle the links that a killed run left: restore files that lost their names, put those of others aside."""
        database = self._database
        links = {file: link for file in self._files for link in _links_of(file)}
        link = links.get(database)
        if link is None:
            pass
        elif database.exists() and database.samefile(link):
            self._restore({file: link for file, link in links.items() if not _was_folded_in(file, link, database)})
        elif link == _link_name(database, link.stat()) and not database.exists():  # a copy of a folder has other inodes
            self._restore(links)
        else:
            self._put_aside(links)
        self._unlink()

    def hold(self) -> None:
        """Link each file. On a filesystem without hard links a deleted database stays lost."""
        self._unlink()
        for file in self._files:
            self._link(file)

    def look(self) -> str | None:
        """Give lost files their names back. Return what a person has to do where that fails, None if all is well."""
        for file, known in list(self._held.items()):
            state, link = _stat(file), _link_name(file, known)
            if state is not None and os.path.samestat(state, known):
                if not link.exists():
                    self._link(file)
            elif state is not None and file == self._database:
                return (
                    f"another file lies at {file}: the line writes on in the file that lay there, {link};"
                    " move the other one away, or stop the daemon to use it"
                )
            elif not link.exists():
                return (
                    f"{file} is gone, and its second name {link} too: nothing that is written now outlives"
                    " the daemon; restart it once the cause is known"
                )
            elif not self._put_back(file, link, _WHILE_IT_RUNS):
                return f"{file} is gone and cannot be put back: check the folder and its permissions"
        return None

    def release(self) -> None:
        """Remove the links of a closed database, so that deleting it frees its files."""
        known = self._held.get(self._database)
        if known is not None and not self._database.exists():
            self._put_back(self._database, _link_name(self._database, known), _WHILE_IT_RUNS)
        self._unlink()

    def _link(self, file: Path) -> None:
        try:
            state = file.stat()
            os.link(file, _link_name(file, state))
        except FileNotFoundError:
            return
        except OSError as error:
            self._log.warning("database_not_linked", file=str(file), error=str(error))
            return
        self._held[file] = state

    def _unlink(self) -> None:
        for file in self._files:
            for link in _links_of(file):
                link.unlink(missing_ok=True)
        self._held.clear()

    def _restore(self, links: dict[Path, Path]) -> None:
        for file, link in links.items():
            advice = (
                f"it was gone at the start, and {link} of a daemon that was killed had it still;"
                " to begin anew stop this daemon, then delete it"
            )
            self._put_back(file, link, advice)

    def _put_back(self, file: Path, link: Path, advice: str) -> bool:
        """Name the linked file `file`, over any other file there; False if that fails."""
        part = file.with_name(f".{file.name}.part")
        try:
            part.unlink(missing_ok=True)
            os.link(link, part)
            part.replace(file)
            sync(file.parent)
        except OSError as error:
            self._log.error("database_not_put_back", file=str(file), error=str(error))
            return False
        self._log.error("database_put_back", file=str(file), advice=advice)
        return True

    def _put_aside(self, links: dict[Path, Path]) -> None:
        database = self._database
        aside = database.with_name(f"{database.name}.aside-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
        for file, link in links.items():
            link.rename(aside.with_name(aside.name + file.name.removeprefix(database.name)))
        sync(database.parent)
        advice = (
            "`aside` has what the line wrote until another file was put in its database's place, or came with a copy of"
            f" another line's folder: delete it, or stop the daemon and move it to {database}"
        )
        self._log.error("database_put_aside", file=str(database), aside=str(aside), advice=advice)


class DatabaseServer:
    """Watch for a database on a server, which minds its own files: only checks that the server answers."""

    def __init__(self, url: str) -> None:
        self._engine = open_for_reading(url)

    def settle(self) -> None:
        """Do nothing."""

    hold = settle

    def look(self) -> str | None:
        """Return why no image can be taken now, None if one can."""
        try:
            self._engine.connect().close()  # a connection pings its server
        except SQLAlchemyError as error:
            return f"the database does not answer: {' '.join(str(getattr(error, 'orig', error)).split())}"
        return None

    def release(self) -> None:
        self._engine.dispose()


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
        self._database.hold()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

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


def _link_name(file: Path, state: os.stat_result) -> Path:
    return file.with_name(f".{file.name}.held-{state.st_ino}")


def _links_of(file: Path) -> list[Path]:
    prefix = f".{file.name}.held-"
    return [path for path in file.parent.iterdir() if path.name.startswith(prefix)] if file.parent.is_dir() else []


def _was_folded_in(file: Path, link: Path, database: Path) -> bool:
    """Return True if `file` is there, or is a log that another program has written into the database after the crash.

    Closing the database deletes the log. The database is the younger file then, and the old log over it would undo
    what was written since, or damage a backup that was copied over it: the copy keeps the inode, and `cp -p` sets the
    modification time back, but not the time of change.
    """
    return file.exists() or link.stat().st_mtime_ns < database.stat().st_ctime_ns


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None
