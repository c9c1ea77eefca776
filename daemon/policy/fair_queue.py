"""Whose message comes next: the one whose source and connection have had least so far (start-time fair queueing).

A source that floods over a hundred connections is one source; one that invents a source for each message is one
connection: either way a publisher that sends now and then goes first. Plain state and plain decisions: no clock, no
threads.
"""

from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

#: What a message costs beside its bytes, in bytes.
_MESSAGE_COST = 50_000


@dataclass(order=True, slots=True)
class _Place(Generic[T]):
    """`tag` is what its flows will have had, in bytes, when this message is done; `number` keeps equals in order."""

    tag: float
    number: int
    names: Sequence[Hashable] = field(compare=False)
    size_bytes: int = field(compare=False)
    item: T = field(compare=False)


@dataclass(slots=True)
class _NamedQueue:
    """Messages of one name that wait, and the tag of the newest."""

    tag: float = 0.0
    waiting: int = 0


class FairQueue(Generic[T]):
    """`add` with every name by which a message's sender is known; `take` the fairest, `shed` the least fair."""

    def __init__(self) -> None:
        self._places: list[_Place[T]] = []
        self._flows: dict[Hashable, _NamedQueue] = {}
        self._bytes = 0
        self._number = 0
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def next_bytes(self) -> int:
        """The size of the message that `take` would give. IndexError where none waits."""
        return self._places[0].size_bytes

    def add(self, names: Sequence[Hashable], item: T, size_bytes: int) -> None:
        """Messages of one name stay in order."""
        flows = [self._flows.setdefault(name, _NamedQueue()) for name in names]
        tag = max(self._now, *(flow.tag for flow in flows)) + size_bytes + _MESSAGE_COST
        for flow in flows:
            flow.tag = tag
            flow.waiting += 1
        self._number += 1
        self._bytes += size_bytes
        insort(self._places, _Place(tag, self._number, names, size_bytes, item))

    def take(self) -> T:
        """The message whose flows have had least. IndexError where none waits."""
        place = self._places.pop(0)
        self._now = place.tag
        return self._leave(place)

    def shed(self) -> T:
        """The newest message of the flow that had, and wants, most. IndexError where none waits."""
        return self._leave(self._places.pop())

    def drop_payload(self, lighter: Callable[[T], T]) -> None:
        """Let the least fair message that has bytes wait on without them, as what `lighter` makes of it."""
        for place in reversed(self._places):
            if place.size_bytes:
                self._bytes -= place.size_bytes
                place.size_bytes, place.item = 0, lighter(place.item)
                return

    def _leave(self, place: _Place[T]) -> T:
        self._bytes -= place.size_bytes
        for name in place.names:
            flow = self._flows[name]
            flow.waiting -= 1
            if not flow.waiting:
                del self._flows[name]
        return place.item

    def check(self) -> None:
        """Assert that sums, order and flows are right."""
        assert self._bytes == sum(place.size_bytes for place in self._places), "bytes differ"
        assert self._places == sorted(self._places), "out of order"
        waiting = sum(flow.waiting for flow in self._flows.values())
        assert waiting == sum(len(place.names) for place in self._places), "flows differ"


class Turns(Generic[T]):
    """Waiting items by the names of their senders, each sender's in its own order, taken in groups."""

    def __init__(self) -> None:
        self._waiting: FairQueue[T] = FairQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, names: Sequence[Hashable], item: T, size_bytes: int) -> None:
        """Add an item; one of a sender that has nothing waiting comes as if that sender had just had its turn."""
        self._waiting.add(names, item, size_bytes)

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
