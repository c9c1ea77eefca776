"""Requests that nobody can serve now, through no fault of theirs: they wait here, not in a queue that they would block.

Two kinds: a load of their expert hangs (they go on when it has ended), or their image's bytes cannot be read just now
(they are tried again and again). Each ends at its deadline, or after `max_s` seconds here.
"""

from dataclasses import dataclass
from typing import Literal

from daemon.policy.request import Request, RequestId
from experts.spec import ExpertId

#: Bytes that could not be read are asked for again after this long.
AGAIN_S = 5.0

#: Why it ends (PROTOCOL.md, `reason` of `unknown`).
End = Literal["deadline", "expert_failed", "bad_image"]


@dataclass(frozen=True, slots=True)
class _Parked:
    request: Request
    until_s: float
    again_s: float | None


class Parked:
    """In the order of their coming. A request that was tried again in vain keeps the time of its first coming."""

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._waiting: dict[RequestId, _Parked] = {}
        self._first_s: dict[RequestId, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def park(self, request: Request, now: float, *, tries_again: bool = False) -> bool:
        """False: it has waited as long as it may."""
        until_s = self._first_s.setdefault(request.request_id, now) + self._max_s
        if now >= until_s:
            self.forget(request.request_id)
            return False
        if request.deadline_s is not None:
            until_s = min(until_s, request.deadline_s)
        again_s = now + AGAIN_S if tries_again else None
        self._waiting[request.request_id] = _Parked(request, until_s, again_s)
        return True

    def forget(self, request_id: RequestId) -> None:
        """The request has ended, or has got on: its next stay is counted anew."""
        self._first_s.pop(request_id, None)

    def of(self, expert: ExpertId) -> list[Request]:
        """Take out who waits for a load of `expert`."""
        return self._take([one for one in self._waiting.values() if one.again_s is None and _is_of(one, expert)])

    def due(self, now: float) -> tuple[list[Request], list[tuple[Request, End]]]:
        """Take out who is to be tried again, and whose time is up, each with the reason."""
        if not self._waiting:
            return [], []
        over = [one for one in self._waiting.values() if one.until_s <= now]
        self._take(over)
        ended: list[tuple[Request, End]] = [(one.request, _end_of(one)) for one in over]
        for request, _ in ended:
            self.forget(request.request_id)
        again = [one for one in self._waiting.values() if one.again_s is not None and one.again_s <= now]
        return self._take(again), ended

    def next_s(self) -> float | None:
        times = [min(one.until_s, one.again_s or one.until_s) for one in self._waiting.values()]
        return min(times, default=None)

    def _take(self, found: list[_Parked]) -> list[Request]:
        for one in found:
            del self._waiting[one.request.request_id]
        return [one.request for one in found]


def _end_of(one: _Parked) -> End:
    if one.until_s == one.request.deadline_s:
        return "deadline"
    return "expert_failed" if one.again_s is None else "bad_image"


def _is_of(one: _Parked, expert: ExpertId) -> bool:
    return one.request.expert == expert
