"""Answers that are kept for some seconds: what costs much to count is counted once for all who look."""

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

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
            raise found.with_traceback(None)  # else it would grow with everybody who is told
        return found[0]


class KeptByKey:
    """Of each key an answer, the `most` newest ones. Any thread; nobody waits for another, and no failure is kept."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._lock = threading.Lock()
        self._found: dict[Hashable, tuple[float, Any]] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gave for `key` at most so many seconds ago."""
        now_s = time.monotonic()
        with self._lock:
            at_s, found = self._found.get(key, (float("-inf"), None))
        if now_s - at_s < self._seconds:
            return found
        made = make()
        with self._lock:
            self._found.pop(key, None)  # the newest stands last
            self._found[key] = (now_s, made)
            while len(self._found) > self._most:
                del self._found[next(iter(self._found))]
        return made
