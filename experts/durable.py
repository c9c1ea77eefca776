"""Files that outlive a power cut. Here because `experts` imports nothing of the daemon, which uses it too."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def read_only_mount(path: Path) -> str | None:
    """Return the problem and remedy if the file system of `path` is mounted read-only, else None."""
    there = next(place for place in (path, *path.parents) if place.exists())
    if not os.statvfs(there).f_flag & os.ST_RDONLY:
        return None
    return f"{there} is mounted read-only: mount it for writing (a service: ReadWritePaths), or name another folder"


def sync(path: Path) -> None:
    """Make a file's bytes durable; for a folder, the names made, changed or removed in it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def replacing(path: Path, mode: int | None = None, owner_of: Path | None = None) -> Iterator[Path]:
    """Yield a new, empty file beside `path`, which replaces `path` when the block ends.

    Readers, and a start after a power cut, find the old file or the whole new one. If the block raises, the old file
    stays. Leftovers of a killed process are overwritten. Without `mode` the umask decides who may read the file. Root
    gives it to the owner of `owner_of`, so that the folder's people go on where somebody with sudo began.
    Raises FileExistsError for a device such as /dev/null, which root could replace.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "is not a file, and is never replaced: name another", str(path))
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else 0o600)
    try:
        yield part
        if mode is not None:
            os.fchmod(fd, mode)  # now: one without the right to write could not be filled
        if owner_of is not None:
            give_to_owner_of(owner_of, fd)
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


def replace_durably(path: Path, content: str | bytes, mode: int | None = None, owner_of: Path | None = None) -> None:
    """Write `content` (text as UTF-8) to `path` whole or not at all, as `replacing` does."""
    with replacing(path, mode, owner_of) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def replace_text(path: Path, text: str, like: Path | None = None) -> None:
    """Replace a file durably; the new one has the mode, and by root the owner, of the old one, or of `like`."""
    model = next((each for each in (path, like) if each is not None and each.exists()), None)
    replace_durably(path, text, model.stat().st_mode & 0o777 if model else None, model)


def make_folders(folder: Path, root: Path) -> None:
    """Make `folder` and its parents below `root` durably, with the mode of `root` and, by root, its owner."""
    missing = [path for path in (folder, *folder.parents) if path.is_relative_to(root) and not path.exists()]
    for path in reversed(missing):
        path.mkdir(parents=True, exist_ok=True)
        if path != root:
            shutil.copymode(root, path)
            give_to_owner_of(root, path)
        sync(path.parent)


def give_to_owner_of(folder: Path, path: Path | int) -> None:
    """Let root give a file, or an open one, to the owner of `folder`."""
    if os.geteuid() == 0:
        owner = folder.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
