"""A reader of files as slow as a given disk."""

import threading
import time
from pathlib import Path

from experts.reading import FileReader


class PacedReader:
    """Another reader as if its disk moved `bytes_per_s`: one transfer at a time, and none ends earlier than it may.

    Transfers of all threads share one clock: each begins where the last one ended, or now if that is later. A disk
    slower than the pace stays as slow as it is.
    """

    def __init__(self, inner: FileReader, bytes_per_s: float) -> None:
        self.inner = inner
        self.bytes_per_s = bytes_per_s
        self._free_at_s = time.monotonic()
        self._channel = threading.Lock()

    def open(self, path: Path) -> int:
        return self.inner.open(path)

    def read(self, descriptor: int, view: memoryview, offset: int) -> None:
        with self._channel:
            self._free_at_s = max(self._free_at_s, time.monotonic()) + len(view) / self.bytes_per_s
            self.inner.read(descriptor, view, offset)
            # A sleep may end early by the clock's grain, hence the loop.
            while (left_s := self._free_at_s - time.monotonic()) > 0:
                time.sleep(left_s)
