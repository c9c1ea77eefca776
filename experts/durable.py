"""Durable files: what was synced or replaced here outlives a power cut.

The daemon and the tools use these functions too; they stand here because `experts` imports nothing of the daemon.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file's bytes durable, or, of a folder, the names that were made, changed or removed in it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yield a new, empty file beside `path`, which takes the place of `path` when the block ends.

    Readers, and a start after a power cut, find the old file or the whole new one. Where the block raises the old file
    stays. What a killed process left is overwritten. Without `mode` the umask decides who may read the file.
    Raises FileExistsError for a device such as /dev/null, which root could replace.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "is not a file, and is never replaced: name another", str(path))
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    try:
        if mode is not None:
            os.fchmod(fd, mode)
        yield part
        os.fsync(fd)
        if not os.path.samestat(os.fstat(fd), part.stat()):
            raise FileExistsError(f"another process writes {path} at the same time: try again")  # noqa: TRY301
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    sync(path.parent)


def replace_durably(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Write `content` (text as UTF-8) to `path`, completely or not at all, as `replacing` does."""
    with replacing(path, mode) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
