"""Read a file into existing memory, without torch: an expert in one read on the CPU, one per staging page on a GPU."""

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

#: Linux moves at most 2 GiB per read call.
MAX_READ_BYTES = 1 << 30
#: One of these is hashed while the next is read: large enough for a disk's queue and for few hand-overs.
_HASHED_BYTES = 8 << 20
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
    """A keyed hash of a region: GMAC (NIST SP 800-38D) of each piece, some computed by `helper` during the reading.

    Nobody without the key can aim at equal values: `value` must stay secret. It depends on how the reads are cut.
    """

    def __init__(self, key: bytes, helper: Executor) -> None:
        self.value = b""
        self._key, self._helper = key, helper

    def read(self, read_file: Read, begin: int, on_bytes: Callable[[memoryview], object] = lambda _: None) -> Read:
        """Return a function that reads the region at byte `begin` with `read_file` (memory, offset), and hashes it."""

        def read(view: memoryview, position: int) -> None:
            pieces = [view[at : at + _HASHED_BYTES] for at in range(0, len(view), _HASHED_BYTES)]
            futures = list[Future[bytes]]()
            for number, piece in enumerate(pieces):
                read_file(piece, begin + position + number * _HASHED_BYTES)
                futures.append(self._helper.submit(self._hash, piece))
                on_bytes(piece)
            # A helper that got no processor is not waited for.
            own = [self._hash(piece) if future.cancel() else b"" for future, piece in zip(futures, pieces, strict=True)]
            self.value += b"".join(value or future.result() for value, future in zip(own, futures, strict=True))

        return read

    def _hash(self, piece: memoryview) -> bytes:
        gmac = Cipher(AES(self._key), GCM(bytes(12))).encryptor()
        gmac.authenticate_additional_data(piece)
        gmac.finalize()
        return gmac.tag


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
