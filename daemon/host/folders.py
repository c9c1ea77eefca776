"""Folders that the daemon makes, durable and readable for the group (RESULTS.md), and exclusive locks.

One line per database, journal and images (PROTOCOL.md, Sockets): locks die with their process.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from daemon.errors import StartError
from experts.durable import sync

FOLDER_MODE = 0o750
#: The lock file in a folder, and the suffix of the one beside a file.
FOLDER_LOCK = ".lock"


def make_folder(folder: Path) -> None:
    """Make `folder` and every missing folder above it: durable, each with its mode under any umask."""
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)
        path.chmod(FOLDER_MODE)
        sync(path.parent)


def folder_problem(folder: Path) -> str | None:
    """Return why files cannot be written below `folder`, which may be missing still."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file, where a folder is needed: move it, or name another folder"
    # Nothing can be made in /proc and similar filesystems, even with permission.
    if not os.access(there, os.W_OK | os.X_OK) or _is_virtual(there):
        return f"nothing can be written in {there}: give this user the right to, or name another folder"
    return None


def _is_virtual(folder: Path) -> bool:
    state = os.statvfs(folder)
    return state.f_blocks == 0


class Lock:
    """An exclusive lock on `path`. The file has the owner's process number and, after its release too, its `line`."""

    def __init__(self, path: Path, guards: str, line: Path, *, stays: bool = True) -> None:
        """Take the lock, or raise StartError naming its process; `guards` is what it protects, and the file `stays`."""
        make_folder(path.parent)
        self._path, self._line, self._stays = path, line, stays
        while True:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.fchmod(self._fd, 0o600)  # reading is enough to lock a file
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._fd)
                raise StartError(
                    f"{guards} is in use by another daemon, process {owner(path)[0] or 'unknown'}: stop it first, or"
                    " name another in coserve.yaml"
                ) from None
            if os.fstat(self._fd).st_nlink:
                break
            os.close(self._fd)  # its owner removed it meanwhile: the next one is another file
        self._write(f"{os.getpid()}\n{line}")

    def release(self) -> None:
        """Release the lock."""
        if self._stays:
            self._write(f"\n{self._line}")
        else:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a full disk: the lock holds without its text
            os.ftruncate(self._fd, os.pwrite(self._fd, os.fsencode(text), 0))


def owner(path: Path) -> tuple[int, str]:
    """Return the process (0: none) and the coserve.yaml ("": unknown) in a lock file; the process may have ended.

    The file is never synced: after a power cut it may hold zeros or other bytes, which are no path.
    """
    try:
        process, _, line = path.read_bytes().partition(b"\n")
    except OSError:
        return 0, ""
    is_path = line.startswith(b"/") and b"\0" not in line
    return int(process) if process.isdigit() else 0, os.fsdecode(line) if is_path else ""
