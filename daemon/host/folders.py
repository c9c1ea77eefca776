"""Folders that the daemon makes, durable and readable for the group (RESULTS.md), and locks that die with a process."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from daemon.errors import StartError
from experts.durable import read_only_mount, sync

FOLDER_MODE = 0o750
#: The lock file in a folder, and the suffix of the one beside a file.
FOLDER_LOCK = ".lock"


def make_folder(folder: Path) -> None:
    """Make `folder` and its missing parents: durable, each with its mode under any umask."""
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
    if mounted := read_only_mount(there):
        return mounted
    # Nothing can be made in /proc and similar filesystems, even with permission.
    if not os.access(there, os.W_OK | os.X_OK) or os.statvfs(there).f_blocks == 0:
        return f"nothing can be written in {there}: give this user the right to, or name another folder"
    return None


@contextmanager
def exclusive_lock(path: Path, guards: str, line: Path, *, stays: bool = True) -> Iterator[None]:
    """Lock the file `path`, or raise StartError; `guards` says what it protects.

    The file names this process and `line`; after the block it is removed, or, if it `stays`, names `line` alone.
    """
    make_folder(path.parent)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, 0o600)  # reading is enough to lock a file
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise StartError(
                f"{guards} is in use by another daemon, process {owner(path)[0] or 'unknown'}: stop it first, or name"
                " another in coserve.yaml"
            ) from None
        if os.fstat(fd).st_nlink:
            break
        os.close(fd)  # its owner removed it meanwhile: the next one is another file
    _write(fd, f"{os.getpid()}\n{line}\n")
    try:
        yield
    finally:
        if stays:
            _write(fd, f"\n{line}\n")
        else:
            path.unlink(missing_ok=True)
        os.close(fd)


def _write(fd: int, text: str) -> None:
    with suppress(OSError):  # a full disk: the lock holds without its text
        os.ftruncate(fd, os.pwrite(fd, os.fsencode(text), 0))


def owner(path: Path) -> tuple[int, str]:
    """Return the process (0: none) and coserve.yaml in a lock file; a power cut may leave neither."""
    try:
        process, begins, rest = path.read_bytes().partition(b"\n")
    except OSError:
        return 0, ""
    line, end, _ = rest.partition(b"\n")
    is_path = bool(end) and line.startswith(b"/") and b"\0" not in line
    return int(process) if begins and process.isdigit() else 0, os.fsdecode(line) if is_path else ""
