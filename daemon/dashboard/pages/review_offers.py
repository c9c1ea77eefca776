"""Who looks at which image just now, so that two people at once seldom meet at one. In memory of the web process only.

Nothing depends on it: whoever decides second about an image hears so from the database's own check.
"""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

#: Somebody who said nothing for so long has gone; what somebody skipped comes last for a shift.
_SHOWN_S = 60.0
_SKIPPED_S = 12 * 3600.0
_MOST = 20_000


class Offers:
    """A seat is one open page; who reviews at it may load it anew, and then sits at another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: OrderedDict[int, tuple[str, float]] = OrderedDict()
        self._skipped: OrderedDict[tuple[str, int], float] = OrderedDict()

    def choose(self, seat: str, reviewer: str, waiting: Sequence[int], held: Collection[int], count: int) -> list[int]:
        """`count` of `waiting` for `seat`, beside those it holds: what nobody else sees, what others see, what
        `reviewer` skipped, the longest ago first.
        """
        now_s = time.monotonic()
        with self._lock:
            for one in held:
                self._show(one, seat, now_s)
            free = [one for one in waiting if one not in held]
            free.sort(key=lambda one: self._rank(seat, reviewer, one, now_s))  # stable: else the order of `waiting`
            chosen = free[:count]
            for one in chosen:
                if self._rank(seat, reviewer, one, now_s)[0] != 1:
                    self._show(one, seat, now_s)
            return chosen

    def skip(self, reviewer: str, inspection_id: int) -> None:
        """`reviewer` sees this one again last; others see it as if nobody had."""
        with self._lock:
            self._skipped[reviewer, inspection_id] = time.monotonic()
            self._skipped.move_to_end((reviewer, inspection_id))
            _bound(self._skipped)
            self._shown.pop(inspection_id, None)

    def remember(self, reviewer: str, skipped: Sequence[int]) -> None:
        """What the reviewer's browser says was skipped, the longest ago first; what is known already stays as it is.

        A web process that was started anew has forgotten all of it, but for a skip that was on its way meanwhile: what
        was skipped before that one stays before it.
        """
        with self._lock:
            at_s = time.monotonic()
            for inspection_id in reversed(skipped):
                at_s = self._skipped.setdefault((reviewer, inspection_id), math.nextafter(at_s, -math.inf))
            _bound(self._skipped)

    def forget(self, inspection_id: int) -> None:
        """It is decided."""
        with self._lock:
            self._shown.pop(inspection_id, None)

    @property
    def excluded(self) -> int:
        """How many of the waiting may be ranked behind: so many more must be asked for."""
        return len(self._shown) + len(self._skipped)

    def _show(self, inspection_id: int, seat: str, now_s: float) -> None:
        self._shown[inspection_id] = (seat, now_s)
        self._shown.move_to_end(inspection_id)
        _bound(self._shown)

    def _rank(self, seat: str, reviewer: str, inspection_id: int, now_s: float) -> tuple[int, float]:
        skipped_s = self._skipped.get((reviewer, inspection_id))
        if skipped_s is not None and now_s - skipped_s < _SKIPPED_S:
            return 2, skipped_s
        shown_to, at_s = self._shown.get(inspection_id, (seat, now_s))
        return (1 if shown_to != seat and now_s - at_s < _SHOWN_S else 0), 0.0


def _bound(places: OrderedDict[Any, Any]) -> None:
    while len(places) > _MOST:
        places.popitem(last=False)
