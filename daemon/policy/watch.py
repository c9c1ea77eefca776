"""Find work that takes too long: pure time, one rule for batches and for loads."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

#: Times what was predicted. What takes this much longer does not come back by itself.
_FACTOR = 20.0
#: A look that comes this much later than it was due says that the whole process stood still (a paused machine, a
#: debugger), and what it watches had no time either.
_LATE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Watched:
    began_s: float
    patience_s: float
    due_s: float


class Watch(Generic[K]):
    """Whoever watches asks `overdue` at `next_s`, or before. `hang_after_s` is the least patience with anything."""

    def __init__(self, hang_after_s: float) -> None:
        self._hang_after_s = hang_after_s
        self._watched: dict[K, _Watched] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._watched

    def begin(self, key: K, began_s: float, predicted_s: float | None, pieces: int = 1) -> None:
        """Watch `key`; where nobody could predict how long it takes, each of its `pieces` may take the least time."""
        patience_s = self._hang_after_s * pieces
        if predicted_s is not None:
            patience_s = max(self._hang_after_s, _FACTOR * predicted_s)
        self._watched[key] = _Watched(began_s, patience_s, began_s + patience_s)

    def end(self, key: K) -> None:
        self._watched.pop(key, None)

    def overdue(self, now: float) -> list[tuple[K, float]]:
        """Those whose time is up, each with its seconds; they are not watched any more."""
        found: list[tuple[K, float]] = []
        for key, one in list(self._watched.items()):
            if now < one.due_s:
                continue
            if now > one.due_s + _LATE_S:
                self._watched[key] = _Watched(one.began_s, one.patience_s, now + one.patience_s)
                continue
            del self._watched[key]
            found.append((key, now - one.began_s))
        return found

    def next_s(self) -> float | None:
        return min((one.due_s for one in self._watched.values()), default=None)
