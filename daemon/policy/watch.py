"""Find work that takes too long: pure time, one rule for batches and for loads."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

#: Work that takes this many times the predicted time does not end on its own.
_FACTOR = 20.0
#: A check this much later than due means that the whole process stood still (a paused machine, a debugger), and the
#: watched work as well.
_LATE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Watched:
    began_s: float
    patience_s: float
    due_s: float


class Watch(Generic[K]):
    """Running work by key. Call `overdue` at `next_s` or before; nothing is overdue before `hang_after_s`."""

    def __init__(self, hang_after_s: float) -> None:
        self._hang_after_s = hang_after_s
        self._watched: dict[K, _Watched] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._watched

    def begin(self, key: K, began_s: float, predicted_s: float | None, pieces: int = 1) -> None:
        """Watch `key`. Without a prediction each of its `pieces` may take `hang_after_s`."""
        patience_s = self._hang_after_s * pieces
        if predicted_s is not None:
            patience_s = max(self._hang_after_s, _FACTOR * predicted_s)
        self._watched[key] = _Watched(began_s, patience_s, began_s + patience_s)

    def end(self, key: K) -> None:
        self._watched.pop(key, None)

    def overdue(self, now: float) -> list[tuple[K, float]]:
        """Return the keys whose time is up, each with its seconds; these are not watched any more."""
        late: list[tuple[K, float]] = []
        for key, work in list(self._watched.items()):
            if now < work.due_s:
                continue
            if now > work.due_s + _LATE_S:
                self._watched[key] = _Watched(work.began_s, work.patience_s, now + work.patience_s)
                continue
            del self._watched[key]
            late.append((key, now - work.began_s))
        return late

    def next_s(self) -> float | None:
        return min((work.due_s for work in self._watched.values()), default=None)
