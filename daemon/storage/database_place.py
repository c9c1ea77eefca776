"""The database's files keep a second name while the daemon runs, so that nobody can delete what is being written.

SQLite goes on writing into a file that somebody has deleted or moved away, and all of it vanishes with the process. A
hard link beside each of its files (`.inspection.db.held`) keeps the file itself, and whoever looks once a second
gives it its name back. After a crash the next start does.

A copy of a running line's folder has those second names too, and they are the other line's results. So the database's
inode is written down beside them (`.inspection.db.held-inode`), which no copy keeps.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import structlog

from daemon.storage.database.connections import server, sqlite_path

_SUFFIXES = ("", "-wal", "-shm")
_WHILE_IT_RUNS = "it was deleted or moved while the daemon runs: stop the daemon first"


class Place(Protocol):
    """Where results lie: `settle` before it is opened, `hold` after, `look` often, `release` at last."""

    def settle(self) -> None: ...

    def hold(self) -> None: ...

    def look(self) -> str | None:
        """Why nothing can be kept there, None where it can."""
        ...

    def release(self) -> None: ...


def place_of(url: str) -> Place:
    """The files of a SQLite database, or the server of another."""
    path = sqlite_path(url)
    return server(url) if path is None else Home(path)


class Home:
    """The files of one SQLite database."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._held: dict[Path, os.stat_result] = {}
        self._log = structlog.get_logger("database")

    def settle(self) -> None:
        """What a run that was killed has left: a file that lost its name gets it back, one that was replaced stays."""
        database, second = self._database, _second(self._database)
        if not second.exists():
            self._forget()
            return
        is_other = database.exists() and not database.samefile(second)
        if (is_other or not database.exists()) and not self._is_own():
            advice = f"`aside` came with a copy of another line's folder: delete it, or stop and move it to {database}"
            self._put_aside("copied", advice)
            return
        if is_other:
            advice = "another file was put in its place while the line ran: what it had written is in `aside`"
            self._put_aside("replaced", advice)
            return
        was_gone = not database.exists()
        for name in self._names():
            if _second(name).exists() and (was_gone or not (name.exists() or _is_older(_second(name), database))):
                self._put_back(
                    name,
                    f"it was gone at the start, and {_second(name)} of a daemon that was killed had it still;"
                    " to begin anew stop this daemon, then delete it",
                )
        self._forget()

    def hold(self) -> None:
        """Give each file its second name. Where the filesystem knows none, deleting stays the end of the results."""
        with suppress(OSError):  # a full disk: then a copy of this folder is taken for the folder itself
            self._mark.write_text(f"{self._database.stat().st_ino}\n", encoding="ascii")
        for name in self._names():
            try:
                _second(name).unlink(missing_ok=True)
                os.link(name, _second(name))
                self._held[name] = name.stat()
            except FileNotFoundError:
                continue
            except OSError as error:
                self._log.warning("database_not_held", file=str(name), error=str(error))

    def look(self) -> str | None:
        """Put back what lost its name; what a person has to do where that cannot be, None where all is well."""
        for name, known in self._held.items():
            there = _stat(name)
            if there is not None and os.path.samestat(there, known):
                if _stat(_second(name)) is None:
                    self._link(name, _second(name))
                continue
            if there is not None and name == self._database:
                return (
                    f"another file lies at {name}: the line writes on in the file that lay there, {_second(name)};"
                    " move the other one away, or stop the daemon to use it"
                )
            second = _stat(_second(name))
            if second is None or not os.path.samestat(second, known):
                return (
                    f"{name} is gone, and its second name {_second(name)} too: nothing that is written now outlives"
                    " the daemon; restart it once the cause is known"
                )
            if not self._put_back(name, _WHILE_IT_RUNS):
                return f"{name} is gone and cannot be put back: check the folder and its permissions"
        return None

    def release(self) -> None:
        """The database is closed: whoever deletes it now deletes it."""
        if self._database in self._held and _stat(self._database) is None:
            self._put_back(self._database, _WHILE_IT_RUNS)
        self._forget()

    @property
    def _mark(self) -> Path:
        return self._database.with_name(f".{self._database.name}.held-inode")

    def _is_own(self) -> bool:
        """Whether the second names are of this folder's own line; one that an older version left has no mark."""
        try:
            return int(self._mark.read_text(encoding="ascii")) == _second(self._database).stat().st_ino
        except (FileNotFoundError, ValueError):
            return True

    def _put_aside(self, what: str, advice: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        aside = self._database.with_name(f"{self._database.name}.{what}-{stamp}")
        for name, other in zip(self._names(), _files_of(aside), strict=True):
            if _second(name).exists():
                _second(name).rename(other)
        self._forget()
        self._log.error(f"database_{what}", file=str(self._database), aside=str(aside), advice=advice)

    def _put_back(self, name: Path, advice: str) -> bool:
        """`name` for the held file again, over whatever file lies there; False where that cannot be."""
        part = name.with_name(f".{name.name}.part")
        try:
            part.unlink(missing_ok=True)
            os.link(_second(name), part)
            part.replace(name)
        except OSError as error:
            self._log.error("database_not_put_back", file=str(name), error=str(error))
            return False
        self._log.error("database_put_back", file=str(name), advice=advice)
        return True

    def _link(self, name: Path, other: Path) -> bool:
        try:
            os.link(name, other)
        except OSError as error:
            self._log.error("database_not_held", file=str(name), error=str(error))
            return False
        return True

    def _forget(self) -> None:
        for name in self._names():
            _second(name).unlink(missing_ok=True)
        self._mark.unlink(missing_ok=True)
        self._held.clear()

    def _names(self) -> Iterator[Path]:
        return _files_of(self._database)


def _files_of(database: Path) -> Iterator[Path]:
    return (database.with_name(database.name + suffix) for suffix in _SUFFIXES)


def _second(name: Path) -> Path:
    return name.with_name(f".{name.name}.held")


def _is_older(file: Path, database: Path) -> bool:
    """Whoever opens the database after a crash writes its WAL back and deletes it: so SQLite ends at the last close.

    The database is the younger then, and the old WAL over it would undo what was written since.
    """
    return file.stat().st_mtime_ns < database.stat().st_mtime_ns


def _stat(name: Path) -> os.stat_result | None:
    try:
        return name.stat()
    except OSError:
        return None
