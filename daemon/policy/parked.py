"""Requests that cannot be served now, through no fault of theirs: they wait here and block no queue.

Either a load of their expert hangs (they go on when it has ended), or their image's bytes cannot be read now (they are
retried). Each ends at its deadline, or after `max_s` seconds here.
"""

from dataclasses import dataclass
from typing import Literal

from daemon.policy.request import Request, RequestId
from experts.spec import ExpertId

#: Pause before bytes that could not be read are read again.
AGAIN_S = 5.0

#: Reason of the end (PROTOCOL.md, `reason` of `unknown`).
End = Literal["deadline", "expert_failed", "bad_image"]


@dataclass(frozen=True, slots=True)
class _Parked:
    request: Request
    until_s: float
    again_s: float | None


class Parked:
    """Requests in the order of arrival here. One that was retried in vain keeps the time of its first arrival."""

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._waiting: dict[RequestId, _Parked] = {}
        self._first_s: dict[RequestId, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def park(self, request: Request, now: float, *, tries_again: bool = False) -> bool:
        """Let `request` wait here; False if it has waited as long as it may."""
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
        """Start the time limit of this request anew at its next stay: it has ended or gone on."""
        self._first_s.pop(request_id, None)

    def of(self, expert: ExpertId) -> list[Request]:
        """Take out and return the requests that wait for a load of `expert`."""
        entries = self._waiting.values()
        return self._take([entry for entry in entries if entry.again_s is None and entry.request.expert == expert])

    def due(self, now: float) -> tuple[list[Request], list[tuple[Request, End]]]:
        """Take out and return the requests to retry, and those whose time is up with the reason of their end."""
        if not self._waiting:
            return [], []
        ended: list[tuple[Request, End]] = []
        late = [entry for entry in self._waiting.values() if entry.until_s <= now]
        for entry, request in zip(late, self._take(late), strict=True):
            reason: End = "expert_failed" if entry.again_s is None else "bad_image"
            ended.append((request, "deadline" if entry.until_s == request.deadline_s else reason))
            self.forget(request.request_id)
        again = [entry for entry in self._waiting.values() if entry.again_s is not None and entry.again_s <= now]
        return self._take(again), ended

    def next_s(self) -> float | None:
        """Return when `due` has something next; None if nothing waits."""
        times = [min(entry.until_s, entry.again_s or entry.until_s) for entry in self._waiting.values()]
        return min(times, default=None)

    def _take(self, entries: list[_Parked]) -> list[Request]:
        return [self._waiting.pop(entry.request.request_id).request for entry in entries]
