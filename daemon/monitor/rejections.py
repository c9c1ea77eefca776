"""Messages of the last hour that will never be accepted, by source and code, for people at the line.

Prometheus counts them too (metrics.py), without the source: names of sources come from outside, and may be many.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from daemon.units import utc_text

_HOUR_S, _MINUTE_S = 3600.0, 60.0
#: Pairs of source and code; the one that was rejected the longest ago makes room.
_MAX_PAIRS = 100


@dataclass(slots=True)
class _Pair:
    """Counts by minute, oldest first, and the newest reason."""

    minutes: deque[list[int]] = field(default_factory=deque[list[int]])
    reason: str = ""
    at_s: float = 0.0


class Rejections:
    """The intake's thread fills it; any thread may read it."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._lock = threading.Lock()
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def note(self, source: str | None, code: str, reason: str) -> None:
        """Count a rejected message; `source` is None where its header could not be read."""
        now_s = self._wall()
        minute = int(now_s // _MINUTE_S)
        with self._lock:
            key = (source or "", code)
            pair = self._pairs[key] = self._pairs.pop(key, None) or _Pair()
            pair.reason, pair.at_s = reason, now_s
            if pair.minutes and pair.minutes[-1][0] == minute:
                pair.minutes[-1][1] += 1
            else:
                pair.minutes.append([minute, 1])
            while len(pair.minutes) > _HOUR_S / _MINUTE_S:
                pair.minutes.popleft()
            while len(self._pairs) > _MAX_PAIRS:
                del self._pairs[next(iter(self._pairs))]

    def rows(self) -> list[dict[str, Any]]:
        """Return source, code, images, the newest reason and its time of the last hour, the newest pair first."""
        since = int((self._wall() - _HOUR_S) // _MINUTE_S)
        with self._lock:
            counts = {key: sum(count for minute, count in pair.minutes if minute > since)
                      for key, pair in self._pairs.items()}  # fmt: skip
            self._pairs = {key: pair for key, pair in self._pairs.items() if counts[key]}
            return [
                {"source": source, "code": code, "images": counts[source, code]}
                | {"reason": pair.reason, "at": utc_text(pair.at_s)}
                for (source, code), pair in reversed(self._pairs.items())
            ]
