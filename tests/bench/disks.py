"""The disks that sides read experts from: as it is but cold, or paced; every side through the same reader."""

import fcntl
import os
from pathlib import Path

from experts.reading import DirectReader, PacedReader, Reader
from tests.bench.job import PACED_BYTES_PER_S, Disk


def reader_of(disk: Disk) -> Reader:
    """Past the page cache; "paced" also sleeps, so that it is no faster than the paper's SSD."""
    return DirectReader() if disk == "cold" else PacedReader(DirectReader(), PACED_BYTES_PER_S)


class SharedDisk:
    """One transfer at a time among processes, as within one: sides of several processes still have one disk."""

    def __init__(self, inner: Reader, lock: Path) -> None:
        self._inner = inner
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
        return self._inner.open(path)

    def read(self, descriptor: int, view: memoryview, offset: int) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._inner.read(descriptor, view, offset)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
