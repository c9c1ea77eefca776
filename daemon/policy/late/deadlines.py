"""Requests with a deadline: the nearest first, and those that can no longer meet it."""

import math
from collections.abc import Callable

from daemon.policy.late.ranking import Ranking
from daemon.policy.request import Request, RequestId
from experts.spec import ExpertId


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
        group = self._requests.setdefault(request.expert, Ranking())
        group.put(request.request_id, (request.deadline_s, request.request_id))
        self.refresh(request.expert)

    def discard(self, request: Request) -> None:
        if self._known.pop(request.request_id, None) is not None:
            self._requests[request.expert].discard(request.request_id)
            self.refresh(request.expert)

    def refresh(self, expert: ExpertId) -> None:
        """Rank `expert` anew: its requests or their least time have changed."""
        latest_s = self.latest_start_s(expert)
        self._latest_start.place(expert, None if latest_s is None else (latest_s, expert))

    def latest_start_s(self, expert: ExpertId) -> float | None:
        """Return when the first request must start to be in time; None without deadlines."""
        head = self._head(expert)
        return None if head is None or head.deadline_s is None else head.deadline_s - self._least_s(expert)

    def nearest(self, expert: ExpertId, before_s: float, limit: int) -> list[Request]:
        latest_s = self.latest_start_s(expert)
        if latest_s is None or latest_s > before_s:
            return []
        last_deadline_s = before_s + self._least_s(expert)
        near = self._requests[expert].up_to((last_deadline_s, math.inf), limit)
        return [self._known[request_id] for request_id in near]

    def due(self, now: float) -> tuple[Request, ...]:
        late: list[Request] = []
        while (first := self._latest_start.first()) is not None and first[1][0] <= now:  # type: ignore[operator]
            expert = first[0]
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
        return None if first is None else float(first[1][0])

    def _head(self, expert: ExpertId) -> Request | None:
        group = self._requests.get(expert)
        first = None if group is None else group.first()
        return None if first is None else self._known[first[0]]
