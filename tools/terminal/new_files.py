"""Output that is complete under its name or absent: room for it, and one process that writes it."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon.config.settings import Config
from daemon.storage.database.upkeep import room_problem
from daemon.storage.disk_space import RESERVE_BYTES
from experts.durable import sync
from tools.terminal.console import CommandError

#: A file that marks an unfinished package; the export that writes the package holds its lock.
MARK = ".coserve-export"


@contextmanager
def unfinished_folder(out: Path) -> Iterator[Path]:
    """Yield `OUT.part`, locked by this process; it becomes `out` at the end, or is deleted after an error."""
    part = out.with_name(f"{out.name}.part")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CommandError(f"{out} is there and not empty: name another folder, or move that one away", status=2)
    mark = part / MARK
    if part.exists() and any(part.iterdir()) and not mark.is_file():
        raise CommandError(f"{part} was not left by an export: move it away", status=2)
    part.mkdir(mode=0o750, parents=True, exist_ok=True)
    with mark.open("w", encoding="utf-8") as locked:
        claim(locked.fileno(), mark, out)
        try:
            _empty(part)  # an export that was killed left its files
            yield part
            mark.unlink()
            sync(part)
            part.rename(out)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    sync(out.absolute().parent)


def claim(fd: int, part: Path, out: Path) -> None:
    """Lock `part`, open as `fd`. Raises CommandError if another process writes `out`, or has just finished."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        problem = f"{out} is being written by another process: wait for it, or name another"
        raise CommandError(problem, status=2) from None
    if not part.exists() or part.stat().st_ino != os.fstat(fd).st_ino:
        raise CommandError(f"{out} was written by another process just now", status=2)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MARK:
            entry.unlink()


def need_room(settings: Config, out: Path, size_bytes: int, what: str) -> None:
    """Raise CommandError if `what` would take space that a line on the same disk reserves."""
    folder = out.absolute().parent
    if settings.journal.exists() and settings.journal.stat().st_dev == folder.stat().st_dev:
        size_bytes += RESERVE_BYTES + (settings.retention.free or 0)
        what += ", with what the line keeps free,"
    problem = room_problem(folder, size_bytes, what)
    if problem:
        raise CommandError(problem)
