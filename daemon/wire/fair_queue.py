"""Fair order of messages: the source and connection that have had least come next (self-clocked fair queueing).

A flood over a hundred connections is one source, a client that invents sources is one connection: a modest publisher
goes first either way. No clock, no threads.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

#: Cost of a message beside its bytes, in bytes.
_MESSAGE_COST = 50_000


@dataclass(order=True, slots=True)
class _Place(Generic[T]):
    """One message. `tag`: what its flows will have had once it is served, in bytes; `number` orders equal tags."""

    tag: float
    number: int
    names: Sequence[Hashable] = field(compare=False)
    size_bytes: int = field(compare=False)
    item: T = field(compare=False)


@dataclass(slots=True)
class _Flow:
    """The messages of one source or connection: the tag of the newest, and how many wait."""

    tag: float = 0.0
    waiting: int = 0


class FairQueue(Generic[T]):
    """Waiting messages; `names` are all names of the sender. `take` removes the fairest, `shed` the least fair."""

    def __init__(self) -> None:
        self._places: list[_Place[T]] = []
        self._flows: defaultdict[Hashable, _Flow] = defaultdict(_Flow)
        self.bytes = 0
        self._number = 0
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, names: Sequence[Hashable], item: T, size_bytes: int) -> None:
        flows = [self._flows[name] for name in names]
        tag = max(self._now, *(flow.tag for flow in flows)) + size_bytes + _MESSAGE_COST
        for flow in flows:
            flow.tag = tag
            flow.waiting += 1
        self._number += 1
        self.bytes += size_bytes
        insort(self._places, _Place(tag, self._number, names, size_bytes, item))

    def take(self) -> T:
        """Remove and return the message whose flows have had least. IndexError if none waits."""
        place = self._places.pop(0)
        self._now = place.tag
        return self._leave(place)

    def take_group(self, max_items: int, max_bytes: int) -> list[T]:
        """Remove the next messages, at most `max_items` of `max_bytes` together; at least one if any waits."""
        group: list[T] = []
        room_bytes = max_bytes
        while self._places and len(group) < max_items:
            size_bytes = self._places[0].size_bytes
            if group and size_bytes > room_bytes:
                break
            group.append(self.take())
            room_bytes -= size_bytes
        return group

    def shed(self) -> T:
        """Remove and return the newest message of the flow with the most bytes. IndexError if none waits."""
        return self._leave(self._places.pop())

    def drop_payload(self, lighter: Callable[[T], T]) -> None:
        """Strip the least fair message that has bytes, as `lighter(item)`."""
        for place in reversed(self._places):
            if place.size_bytes:
                self.bytes -= place.size_bytes
                place.size_bytes, place.item = 0, lighter(place.item)
                return

    def _leave(self, place: _Place[T]) -> T:
        self.bytes -= place.size_bytes
        for name in place.names:
            flow = self._flows[name]
            flow.waiting -= 1
            if not flow.waiting:
                del self._flows[name]
        return place.item

    def check(self) -> None:
        assert self.bytes == sum(place.size_bytes for place in self._places), "bytes differ"
        assert self._places == sorted(self._places), "out of order"
        waiting = sum(flow.waiting for flow in self._flows.values())
        assert waiting == sum(len(place.names) for place in self._places), "flows differ"
