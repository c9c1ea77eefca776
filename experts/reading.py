"""Read a file into existing memory, without torch: an expert in one read on the CPU, one per staging page on a GPU."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

#: Linux moves at most 2 GiB per read call.
MAX_READ_BYTES = 1 << 30
#: Without O_NONBLOCK, opening a pipe of that name would block.
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class FileReader(Protocol):
    def open(self, path: Path) -> int:
        """Return a descriptor that the caller closes with os.close. Raises OSError."""
        ...

    def read(self, descriptor: int, view: memoryview, offset: int) -> None:
        """Fill `view`, writable bytes, from the file at `offset`. Raises EOFError, OSError."""
        ...


#: Fills memory from a file's region, from a position within the region (bytes) on. Raises EOFError, OSError.
Read = Callable[[memoryview, int], None]


def region_read(
    reader: FileReader, descriptor: int, begin: int, on_bytes: Callable[[memoryview], object] | None = None
) -> Read:
    """Return a function that reads a file's region from byte `begin` on; `on_bytes` gets each part read."""

    def read(view: memoryview, position: int) -> None:
        reader.read(descriptor, view, begin + position)
        if on_bytes is not None:
            on_bytes(view)

    return read


class CachedReader:
    def open(self, path: Path) -> int:
        return os.open(path, OPEN_FLAGS)

    def read(self, descriptor: int, view: memoryview, offset: int) -> None:
        read_exactly(descriptor, view, offset)


def read_exactly(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill `view` from the file at `offset`, through short reads. Raises EOFError, OSError."""
    position = 0
    while position < len(view):
        count = os.preadv(descriptor, [view[position : position + MAX_READ_BYTES]], offset + position)
        if count == 0:
            raise EOFError(f"the file ends {len(view) - position} bytes early")
        position += count


def drop_cached(path: Path) -> None:
    """Write the file's pages to disk and drop them, so that the next read is cold. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)  # pages that are not on the disk yet cannot be forgotten
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
