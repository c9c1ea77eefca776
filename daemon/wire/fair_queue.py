"""Fair order of messages: the source and connection that have had least come next (self-clocked fair queueing).

A flood over a hundred connections is one source, a client that invents sources is one connection: a modest publisher
goes first either way. No clock, no threads.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

#: Cost of a message beside its bytes, in bytes.
_MESSAGE_COST = 50_000


class FairQueue(Generic[T]):
    """Waiting messages; `names` are all names of the sender. `take_next` removes the fairest, `shed` the least fair."""

    def __init__(self) -> None:
        #: Sorted: tag, number, names of the flows, bytes and message. The tag is what the flows will have had once the
        #: message is served, in bytes; the number orders equal tags.
        self._places: list[tuple[float, int, Sequence[Hashable], int, T]] = []
        #: By flow (source or connection) the tag of the newest message, and how many wait.
        self._tags: dict[Hashable, float] = {}
        self._waiting: Counter[Hashable] = Counter()
        self.bytes = 0
        self._number = 0
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, names: Sequence[Hashable], item: T, size_bytes: int) -> None:
        tag = max(self._now, *(self._tags.get(name, 0.0) for name in names)) + size_bytes + _MESSAGE_COST
        self._tags.update(dict.fromkeys(names, tag))
        self._waiting.update(names)
        self._number += 1
        self.bytes += size_bytes
        insort(self._places, (tag, self._number, names, size_bytes, item))

    def take_next(self) -> T:
        """Remove and return the message whose flows have had least. IndexError if none waits."""
        self._now, _, names, size_bytes, item = self._places.pop(0)
        self._leave(names, size_bytes)
        return item

    def take_group(self, max_items: int, max_bytes: int) -> list[T]:
        """Remove the next messages, at most `max_items` of `max_bytes` together; at least one if any waits."""
        group: list[T] = []
        room_bytes = max_bytes
        while self._places and len(group) < max_items:
            size_bytes = self._places[0][3]
            if group and size_bytes > room_bytes:
                break
            group.append(self.take_next())
            room_bytes -= size_bytes
        return group

    def shed(self) -> T:
        """Remove and return the newest message of the flow with the most bytes. IndexError if none waits."""
        _, _, names, size_bytes, item = self._places.pop()
        self._leave(names, size_bytes)
        return item

    def drop_payload(self, lighter: Callable[[T], T]) -> None:
        """Strip the least fair message that has bytes, as `lighter(item)`."""
        for at in reversed(range(len(self._places))):
            tag, number, names, size_bytes, item = self._places[at]
            if size_bytes:
                self.bytes -= size_bytes
                self._places[at] = (tag, number, names, 0, lighter(item))
                return

    def _leave(self, names: Sequence[Hashable], size_bytes: int) -> None:
        self.bytes -= size_bytes
        for name in names:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name], self._tags[name]
