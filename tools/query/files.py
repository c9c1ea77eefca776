"""Files that a query writes: their mode, and what to say where one cannot be written."""

import errno
import signal
from pathlib import Path

from tools.cli.console import fail

#: As the database: others read through the group.
MODE = 0o640


def why(error: OSError, path: Path) -> str:
    """What the system said; of a full disk the file that was to be written is named, whichever was being read."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return f"{path}: {error.strerror}; make room, or name another disk"
    return f"{error.filename or path}: {error.strerror or error}"


def leave_cleanly() -> None:
    """SIGTERM ends a command like Ctrl-C: what is half written goes."""
    signal.signal(signal.SIGTERM, lambda *_: fail("stopped by SIGTERM", status=1))
