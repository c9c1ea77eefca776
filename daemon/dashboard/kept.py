"""An answer that is kept for some seconds: what costs much to count is counted once for all who look."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """Any thread. Whoever comes while it is counted waits for that count; one that failed is kept as long."""

    def __init__(self, seconds: float, make: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._make = make
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s = float("-inf")
        self._found: tuple[T] | Exception = KeyError()

    def get(self) -> T:
        """What `make` gave at most so many seconds ago; raises what it raised."""
        with self._lock:
            if self._clock() >= self._until_s:
                try:
                    self._found = (self._make(),)
                except Exception as error:  # noqa: BLE001 - told to everybody who asks
                    self._found = error
                self._until_s = self._clock() + self._seconds
            found = self._found
        if isinstance(found, Exception):
            raise found
        return found[0]
