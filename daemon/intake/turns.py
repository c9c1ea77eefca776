"""Whose image comes next: sources take turns by bytes, so that one that floods does not put its queue before another's.

Plain state and plain decisions: no clock, no threads.
"""

from typing import Generic, TypeVar

from daemon.intake.fair_queue import FairQueue

T = TypeVar("T")


class Turns(Generic[T]):
    """Waiting items by source, each source's in its own order, taken in groups."""

    def __init__(self) -> None:
        self._waiting: FairQueue[T] = FairQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, source: str, item: T, size_bytes: int) -> None:
        """A source that has nothing waiting comes as if it had just had its turn."""
        self._waiting.add((source,), item, size_bytes)

    def take(self, most: int, most_bytes: int) -> list[T]:
        """At most `most` items and `most_bytes`, but one at least where any waits, however large it is.

        What does not fit any more ends the group, and comes first the next time.
        """
        group: list[T] = []
        room_bytes = most_bytes
        while len(self._waiting) and len(group) < most:
            size_bytes = self._waiting.next_bytes
            if group and size_bytes > room_bytes:
                break
            group.append(self._waiting.take())
            room_bytes -= size_bytes
        return group
