"""Find work that takes too long: pure time, one rule for batches and for loads."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

#: Work that takes this many times the predicted time does not end on its own.
_FACTOR = 20.0
#: Checks within the shortest patience. Each counts at most two intervals: a process that stood still (suspended, in a
#: debugger, a paused machine) counts the time in which it ran.
_CHECKS = 30
_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class _Watched:
    began_s: float
    patience_s: float


class Watch(Generic[K]):
    """Running work by key. Call `overdue` at `next_s` or before; nothing is overdue before `hang_after_s`.

    Time is that in which this process ran: the sum of the intervals between checks, each of them bounded.
    """

    def __init__(self, hang_after_s: float) -> None:
        self._hang_after_s = hang_after_s
        self.check_every_s = hang_after_s / _CHECKS
        self._watched: dict[K, _Watched] = {}
        self._ran_s = self._checked_s = 0.0

    def __contains__(self, key: K) -> bool:
        return key in self._watched

    def begin(self, key: K, began_s: float, predicted_s: float | None, pieces: int = 1) -> None:
        """Watch `key`. Without a prediction each of its `pieces` may take `hang_after_s`."""
        patience_s = self._hang_after_s * pieces
        if predicted_s is not None:
            patience_s = max(self._hang_after_s, _FACTOR * predicted_s)
        self._count_to(began_s)
        self._watched[key] = _Watched(self._ran_s, patience_s)

    def end(self, key: K) -> None:
        self._watched.pop(key, None)

    def overdue(self, now: float) -> list[tuple[K, float]]:
        """Return the keys whose time is up, each with its seconds; these are not watched any more."""
        self._count_to(now)
        took_s = {key: self._ran_s - work.began_s for key, work in self._watched.items()}
        late = [(key, s) for key, s in took_s.items() if s > self._watched[key].patience_s - _ROUNDING_S]
        for key, _ in late:
            del self._watched[key]
        return late

    def next_s(self) -> float | None:
        ends_s = [work.began_s + work.patience_s for work in self._watched.values()]
        return self._checked_s + min(self.check_every_s, min(ends_s) - self._ran_s) if ends_s else None

    def _count_to(self, now: float) -> None:
        if now > self._checked_s:
            self._ran_s += min(now - self._checked_s, 2 * self.check_every_s)
            self._checked_s = now
