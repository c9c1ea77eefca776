"""Requests with a deadline: the nearest first, and those that can no longer meet it."""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Generic, TypeVar

from daemon.policy.request import Request, RequestId
from experts.spec import ExpertId

K = TypeVar("K", RequestId, ExpertId)


class Ranking(Generic[K]):
    """Items by a time each, the earliest first; ties go by the items themselves."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, K]] = []
        self._times: dict[K, float] = {}

    def put(self, item: K, time_s: float) -> None:
        self.discard(item)
        self._times[item] = time_s
        insort(self._sorted, (time_s, item))

    def discard(self, item: K) -> None:
        time_s = self._times.pop(item, None)
        if time_s is not None:
            del self._sorted[bisect_left(self._sorted, (time_s, item))]

    def first(self) -> tuple[float, K] | None:
        return self._sorted[0] if self._sorted else None

    def up_to(self, last_s: float, limit: int) -> list[K]:
        """Return the first items whose times are not above `last_s`, at most `limit`."""
        return [item for time_s, item in self._sorted[:limit] if time_s <= last_s]


class Deadlines:
    """Queued requests that have a deadline, by expert.

    `least_s(expert)` is the least time in seconds in which a request of it can still be answered.
    """

    def __init__(self, least_s: Callable[[ExpertId], float]) -> None:
        self._least_s = least_s
        self._requests: dict[ExpertId, Ranking[RequestId]] = {}
        self._known: dict[RequestId, Request] = {}
        self._latest_start: Ranking[ExpertId] = Ranking()

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, request: Request) -> None:
        if request.deadline_s is None:
            return
        self._known[request.request_id] = request
        self._requests.setdefault(request.expert, Ranking()).put(request.request_id, request.deadline_s)
        self.refresh(request.expert)

    def discard(self, request: Request) -> None:
        if self._known.pop(request.request_id, None) is not None:
            self._requests[request.expert].discard(request.request_id)
            self.refresh(request.expert)

    def refresh(self, expert: ExpertId) -> None:
        """Rank `expert` anew: its requests or their least time have changed."""
        latest_s = self.latest_start_s(expert)
        if latest_s is None:
            self._latest_start.discard(expert)
        else:
            self._latest_start.put(expert, latest_s)

    def latest_start_s(self, expert: ExpertId) -> float | None:
        """Return when the first request must start to be in time; None without deadlines."""
        head = self._head(expert)
        return None if head is None or head.deadline_s is None else head.deadline_s - self._least_s(expert)

    def nearest(self, expert: ExpertId, before_s: float, limit: int) -> list[Request]:
        latest_s = self.latest_start_s(expert)
        if latest_s is None or latest_s > before_s:
            return []
        near = self._requests[expert].up_to(before_s + self._least_s(expert), limit)
        return [self._known[request_id] for request_id in near]

    def due(self, now: float) -> tuple[Request, ...]:
        late: list[Request] = []
        while (first := self._latest_start.first()) is not None and first[0] <= now:
            expert = first[1]
            self.refresh(expert)
            head = self._head(expert)
            latest_s = self.latest_start_s(expert)
            if head is None or latest_s is None or latest_s > now:
                continue
            late.append(head)
            self.discard(head)
        return tuple(late)

    def next_s(self) -> float | None:
        first = self._latest_start.first() if self._known else None
        return None if first is None else first[0]

    def _head(self, expert: ExpertId) -> Request | None:
        group = self._requests.get(expert)
        first = None if group is None else group.first()
        return None if first is None else self._known[first[1]]
