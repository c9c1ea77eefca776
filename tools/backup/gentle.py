"""Read and write large files beside a running line: in pieces, without pushing its files out of memory."""

import ctypes
import hashlib
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby

import numpy as np

PIECE_BYTES = 2**20
_libc = ctypes.CDLL(None, use_errno=True)
#: Bytes written between two flushes: one large flush would hold up the journal's small ones.
_FLUSH_BYTES = 8 * 2**20


def step_back() -> None:
    """Give every other process the first turn at processors, and with them at the disk."""
    with suppress(OSError):
        os.nice(19)


class GentleReader:
    """The first `size` bytes of an open file, hashed as they are read; pages that were not cached do not stay."""

    def __init__(self, fd: int, size: int, on_read: Callable[[int], None] = lambda _: None) -> None:
        """`on_read` gets the bytes read so far."""
        self._fd = fd
        self._size = size
        self._on_read = on_read
        self._at = 0
        self._digest = hashlib.sha256()
        # Reading ahead would make pages look as if another program had asked for them.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def read(self, count: int = PIECE_BYTES) -> bytes:
        """Return at most a piece; empty at the end, and where the file ends early."""
        count = min(count, PIECE_BYTES, self._size - self._at)
        absent = absent_pages(self._fd, self._at, count)
        data = os.pread(self._fd, count, self._at)
        for offset, length in absent:
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)
        self._at += len(data)
        self._digest.update(data)
        self._on_read(self._at)
        return data


class GentleWriter:
    """A new file, written in order; what is on disk leaves memory."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0
        self._flushed = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._at += written
            view = view[written:]
        if self._at - self._flushed >= _FLUSH_BYTES:
            self.flush()
        return len(data)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, self._flushed, self._at - self._flushed, os.POSIX_FADV_DONTNEED)
        self._flushed = self._at


def absent_pages(fd: int, offset: int, count: int) -> list[tuple[int, int]]:
    """Return the parts of a file, as (offset, length), that memory does not hold; none if the system does not tell.

    `offset` is a multiple of the page size. Reading with RWF_NOWAIT would tell too, but brings pages in.
    """
    if count == 0:
        return []
    residency = (ctypes.c_ubyte * -(-count // mmap.PAGESIZE))()
    try:
        with mmap.mmap(fd, count, prot=mmap.PROT_READ, offset=offset) as pages:
            address = np.frombuffer(pages, np.uint8).ctypes.data
            failed = _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(count), residency)
    except (ValueError, OSError):  # the file ends before, or cannot be mapped
        return []
    if failed:
        return []
    absent_parts: list[tuple[int, int]] = []
    page = 0
    for is_held, run in groupby(value & 1 for value in residency):
        length = len(list(run))
        if not is_held:
            absent_parts.append((offset + page * mmap.PAGESIZE, length * mmap.PAGESIZE))
        page += length
    return absent_parts
