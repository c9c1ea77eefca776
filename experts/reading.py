"""Read a file into existing memory, without torch: an expert in one read on the CPU, one per staging page on a GPU."""

import os
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

#: Linux moves at most 2 GiB per read call.
MAX_READ_BYTES = 1 << 30
#: One of these is hashed while the next is read.
_HASHED_BYTES = 2 << 20
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


class KeyedHash:
    """GMAC (NIST SP 800-38D) under a secret key: finds any change, and nobody can aim at an equal value. 21 GB/s."""

    def __init__(self, key: bytes) -> None:
        self._gmac = Cipher(AES(key), GCM(bytes(12))).encryptor()
        self.update = self._gmac.authenticate_additional_data

    def digest(self) -> bytes:
        """Return the value, which must stay secret. Ends the hash."""
        self._gmac.finalize()
        return self._gmac.tag


def region_read(
    read_file: Callable[[memoryview, int], None], begin: int, helper: Executor, update: Callable[[memoryview], object]
) -> Read:
    """Return a function that reads a file's region from byte `begin` on, with `read_file` (memory, offset).

    `update` gets all parts in order, as they are in memory: on `helper`, one thread, while this one reads the next.
    """

    def read(view: memoryview, position: int) -> None:
        hashed = None
        for at in range(0, len(view), _HASHED_BYTES):
            piece = view[at : at + _HASHED_BYTES]
            read_file(piece, begin + position + at)
            if hashed is not None:
                hashed.result()
            if at + _HASHED_BYTES < len(view):
                hashed = helper.submit(update, piece)
            else:
                update(piece)

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
