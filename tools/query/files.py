"""Files that appear under their name when they are complete, or not at all."""

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon.host.folders import sync
from tools.cli.console import fail

#: As the database: others read through the group.
MODE = 0o640


@contextmanager
def complete_or_not(path: Path) -> Iterator[Path]:
    """A `.part` beside `path`, new and empty; it becomes `path` at the end, and goes where that fails."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE))
        yield part
        sync(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def why(error: OSError, path: Path) -> str:
    """What the system said; of a full disk the file that was to be written is named, whichever was being read."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return f"{path}: {error.strerror}; make room, or name another disk"
    return f"{error.filename or path}: {error.strerror or error}"


def leave_cleanly() -> None:
    """SIGTERM ends a command like Ctrl-C: what is half written goes."""
    signal.signal(signal.SIGTERM, lambda *_: fail("stopped by SIGTERM", status=1))
