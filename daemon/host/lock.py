"""One daemon per database and per journal (PROTOCOL.md, Sockets): exclusive locks that die with their process."""

import fcntl
import os
from pathlib import Path
from typing import IO

from daemon.errors import StartError
from daemon.host.folders import make_folder


class Lock:
    """An exclusive lock on `path`, which holds the owner's process number while it is taken."""

    def __init__(self, path: Path, guards: str) -> None:
        """Take the lock or raise StartError naming the process that has it; `guards` says what it protects."""
        make_folder(path.parent)
        self._file: IO[str] = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
        os.fchmod(self._file.fileno(), 0o600)  # reading is enough to lock a file
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise StartError(
                f"{guards} is in use by another daemon, process {owner}: stop it first, or name another in coserve.yaml"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        """Release the lock; the file stays, since removing it would let two daemons lock two different inodes."""
        self._file.truncate(0)
        self._file.close()


def claim(database: Path | None, journal: Path) -> list[Lock]:
    """Take the locks of a line, on its database (if that is a file) and its journal: all of them or none."""
    locks: list[Lock] = []
    try:
        if database is not None:
            locks.append(Lock(database.with_name(database.name + ".lock"), f"the database {database}"))
        locks.append(Lock(journal / "lock", f"the journal {journal}"))
    except (StartError, OSError):
        for lock in locks:
            lock.release()
        raise
    return locks
