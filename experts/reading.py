"""Ways to read a file into memory that exists already: through the page cache, or past it.

A weights file is one region, so that reading an expert is one call of `FileReader.read` on the CPU and one per staging
page on a GPU. No torch here.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Literal, Protocol

#: Linux moves at most 2 GiB per read call.
_READ_BYTES = 1 << 30
#: Addresses, offsets and lengths that are multiples of this suit every disk's O_DIRECT.
_ALIGNMENT_BYTES = 4096
_BOUNCE_BYTES = 1 << 20
#: Without O_NONBLOCK, opening a pipe of that name would block.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

#: How bytes came: from the disk past the page cache, from the disk after the cache was dropped, or as they were.
Method = Literal["direct", "dropped", "cached"]


class FileReader(Protocol):
    """Opens files and reads parts of them. Thread-safe."""

    def open(self, path: Path) -> int:
        """Return a descriptor that the caller closes with os.close. Raises OSError."""
        ...

    def read(self, descriptor: int, view: memoryview, offset: int) -> None:
        """Fill all of `view`, writable bytes, from the file at `offset`. Raises EOFError, OSError."""
        ...


class CachedReader:
    """Reads through the page cache: from memory what the machine still has there, from the disk what it has not."""

    def open(self, path: Path) -> int:
        return os.open(path, _OPEN_FLAGS)

    def read(self, descriptor: int, view: memoryview, offset: int) -> None:
        read_exactly(descriptor, view, offset)


class DirectReader:
    """Reads from the disk past the page cache: with O_DIRECT straight into place.

    Where a filesystem refuses O_DIRECT the file's cached pages are dropped before each read; where that has no
    effect either (a filesystem in memory), the read is an ordinary one. `method` is the weakest that was needed.
    """

    def __init__(self) -> None:
        self.method: Method = "direct"

    def open(self, path: Path) -> int:
        try:
            return os.open(path, _OPEN_FLAGS | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(path, _OPEN_FLAGS)

    def read(self, descriptor: int, view: memoryview, offset: int) -> None:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            try:
                _read_direct(descriptor, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            else:
                return
        dropped = _drop(descriptor, offset, len(view))
        if self.method != "cached":
            self.method = "dropped" if dropped else "cached"
        read_exactly(descriptor, view, offset)


def read_exactly(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill `view` from the file at `offset`, however short the single reads are. Raises EOFError, OSError."""
    position = 0
    while position < len(view):
        count = os.preadv(descriptor, [view[position : position + _READ_BYTES]], offset + position)
        if count == 0:
            raise EOFError(f"the file ends {len(view) - position} bytes early")
        position += count


def drop_cached(path: Path) -> None:
    """Write the file's pages to the disk and forget them, so that the next read is a cold one. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)  # pages that are not on the disk yet cannot be forgotten
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read_direct(descriptor: int, view: memoryview, offset: int) -> None:
    """Read aligned parts straight into place, the rest through an aligned buffer."""
    position = 0
    if len(view) and offset % _ALIGNMENT_BYTES == 0 and _address(view) % _ALIGNMENT_BYTES == 0:
        whole = len(view) - len(view) % _ALIGNMENT_BYTES
        while position < whole:
            part = view[position : min(position + _READ_BYTES, whole)]
            count = os.preadv(descriptor, [part], offset + position)
            position += count
            if count == 0 or count % _ALIGNMENT_BYTES:
                break  # the file ends within: the other way says where
    if position < len(view):
        _read_bounced(descriptor, view[position:], offset + position)


def _read_bounced(descriptor: int, view: memoryview, offset: int) -> None:
    position = 0
    with mmap.mmap(-1, _BOUNCE_BYTES) as bounce:
        while position < len(view):
            skip = (offset + position) % _ALIGNMENT_BYTES
            count = os.preadv(descriptor, [bounce], offset + position - skip) - skip
            if count <= 0:
                raise EOFError(f"the file ends {len(view) - position} bytes early")
            taken = min(count, len(view) - position)
            view[position : position + taken] = bounce[skip : skip + taken]
            position += taken


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _drop(descriptor: int, offset: int, size_bytes: int) -> bool:
    """Drop the cached pages of a part of a file; return True if the next read goes to the disk."""
    os.posix_fadvise(descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 0
    except OSError as error:
        return error.errno == errno.EAGAIN
