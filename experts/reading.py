"""Read a file into existing memory, without torch: an expert in one read on the CPU, one per staging page on a GPU."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

#: Linux moves at most 2 GiB per read call.
MAX_READ_BYTES = 1 << 30
#: Read and hashed at a time: meanwhile the kernel reads ahead, and other threads run between two pieces.
_PIECE_BYTES = 1 << 20
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


class RegionHash:
    """A keyed hash of a region, computed as it is read: GMAC (NIST SP 800-38D).

    Nobody without the key can aim at equal values: `value` must stay secret.
    """

    def __init__(self, key: bytes) -> None:
        self._gmac = Cipher(AES(key), GCM(bytes(12))).encryptor()

    def value(self) -> bytes:
        """End the hash and return its value."""
        self._gmac.finalize()
        return self._gmac.tag

    def read(self, read_file: Read, begin: int, on_bytes: Callable[[memoryview], object] = lambda _: None) -> Read:
        """Return a function that reads the region at byte `begin` with `read_file` (memory, offset), and hashes it."""

        def read(view: memoryview, position: int) -> None:
            for at in range(0, len(view), _PIECE_BYTES):
                piece = view[at : at + _PIECE_BYTES]
                read_file(piece, begin + position + at)
                on_bytes(piece)
                self._gmac.authenticate_additional_data(piece)

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
