"""Readers from a cold disk, for benchmarks of loads: all of their sides read with the same."""

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Literal

from experts.reading import MAX_READ_BYTES, OPEN_FLAGS, CachedReader, read_exactly

#: Addresses, offsets and lengths that are multiples of this suit every disk's O_DIRECT.
_ALIGNMENT_BYTES = 4096
_BOUNCE_BYTES = 1 << 20

#: How bytes came: from the disk past the page cache, from the disk after the cache was dropped, or as they were.
Method = Literal["direct", "dropped", "cached"]


class DirectReader:
    """Reads from the disk past the page cache: with O_DIRECT straight into place.

    Where a filesystem refuses O_DIRECT the file's cached pages are dropped before each read; where that has no
    effect either (a filesystem in memory), the read is an ordinary one. `method` is the weakest that was needed.
    """

    def __init__(self) -> None:
        self.method: Method = "direct"

    def open(self, path: Path) -> int:
        try:
            return os.open(path, OPEN_FLAGS | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(path, OPEN_FLAGS)

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


class DroppedReader(CachedReader):
    """The line's own reader, of files whose cached pages were dropped when they are opened."""

    def __init__(self) -> None:
        self.method: Method = "dropped"

    def open(self, path: Path) -> int:
        descriptor = super().open(path)
        if not any(_drop(descriptor, 0, 0) for _ in range(3)):  # asking may itself bring pages back
            self.method = "cached"
        return descriptor


def _read_direct(descriptor: int, view: memoryview, offset: int) -> None:
    """Read aligned parts straight into place, the rest through an aligned buffer."""
    position = 0
    if len(view) and offset % _ALIGNMENT_BYTES == 0 and _address(view) % _ALIGNMENT_BYTES == 0:
        whole = len(view) - len(view) % _ALIGNMENT_BYTES
        while position < whole:
            part = view[position : min(position + MAX_READ_BYTES, whole)]
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
