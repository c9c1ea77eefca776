"""Letters from any thread to the one thread that owns a socket, and a file descriptor that wakes its poller."""

import os
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """`put` from anywhere; `take_all` and `close` by the owner, whose poller watches `fileno()`."""

    def __init__(self) -> None:
        self._letters: deque[T] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # a descriptor closed under a writer may by then be somebody's file
        self._closed = False

    def fileno(self) -> int:
        return self._wake

    def put(self, letter: T) -> None:
        """Leave a letter. One that comes after `close` is dropped: nobody reads it any more."""
        with self._lock:
            self._letters.append(letter)
            # The first letter wakes the owner, who takes all: a wake for each would be a system call for each.
            if len(self._letters) == 1 and not self._closed:
                os.eventfd_write(self._wake, 1)

    def wake(self) -> None:
        """Make the owner look up, as a letter would."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def take_all(self) -> list[T]:
        """Every letter so far, oldest first. The descriptor is cleared first, so that no later letter goes unseen."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        letters: list[T] = []
        while self._letters:
            letters.append(self._letters.popleft())
        return letters

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._wake)
