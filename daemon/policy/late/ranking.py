"""A priority queue whose items may change rank or leave at any time."""

import heapq
from typing import Generic, TypeVar

K = TypeVar("K")

#: Smaller comes first. Ranks end in something unique per item, so that ties never depend on the heap's history.
Rank = tuple[float | str, ...]


class Ranking(Generic[K]):
    """Ranks any number of items, in a heap. `put` and `discard` cost O(log n), stale entries are skipped lazily."""

    __slots__ = ("_current", "_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, K]] = []
        self._current: dict[K, tuple[Rank, int]] = {}
        self._serial = 0

    def put(self, item: K, rank: Rank) -> None:
        current = self._current.get(item)
        if current is not None and current[0] == rank:
            return
        self._serial += 1
        self._current[item] = (rank, self._serial)
        heapq.heappush(self._heap, (rank, self._serial, item))
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [(rank_of_key, serial, key) for key, (rank_of_key, serial) in self._current.items()]
            heapq.heapify(self._heap)

    def place(self, item: K, rank: Rank | None) -> None:
        """Put `item` at `rank`; None: take it out."""
        if rank is None:
            self.discard(item)
        else:
            self.put(item, rank)

    def discard(self, item: K) -> None:
        self._current.pop(item, None)

    def first(self) -> tuple[K, Rank] | None:
        while self._heap:
            rank, serial, item = self._heap[0]
            if self._current.get(item) == (rank, serial):
                return item, rank
            heapq.heappop(self._heap)
        return None

    def up_to(self, rank: Rank, limit: int) -> list[K]:
        """Return the first items whose ranks are not above `rank`, at most `limit`."""
        taken: list[tuple[Rank, int, K]] = []
        while len(taken) < limit and (first := self.first()) is not None and first[1] <= rank:
            taken.append(heapq.heappop(self._heap))
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return [item for _, _, item in taken]
