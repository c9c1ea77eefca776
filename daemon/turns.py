"""Whose image comes next: sources take turns, so that one that floods does not put its queue in front of another's.

Plain state and plain decisions: no clock, no threads.
"""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Waiting items by source, each source's in its own order. `take` gives one of each source a round."""

    def __init__(self) -> None:
        #: Sources in the order of their next turn; none of them is empty.
        self._waiting: OrderedDict[str, deque[tuple[T, int]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, source: str, item: T, size_bytes: int) -> None:
        """A source that has nothing waiting comes after all that have."""
        self._waiting.setdefault(source, deque()).append((item, size_bytes))
        self._count += 1

    def take(self, most: int, most_bytes: int) -> list[T]:
        """At most `most` items and `most_bytes`, but one at least where any waits, however large it is.

        What does not fit any more ends the group, and its source comes first the next time.
        """
        group: list[T] = []
        room_bytes = most_bytes
        while self._waiting and len(group) < most:
            source = next(iter(self._waiting))
            queue = self._waiting[source]
            if group and queue[0][1] > room_bytes:
                break
            item, size_bytes = queue.popleft()
            group.append(item)
            room_bytes -= size_bytes
            if queue:
                self._waiting.move_to_end(source)
            else:
                del self._waiting[source]
        self._count -= len(group)
        return group
