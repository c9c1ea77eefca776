"""The last minutes in memory: which batches ran, what was loaded, how much waited, and what was rejected.

The database does not say when a batch began, and asking it each second would cost more than these few rows.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from daemon.records import BatchDone, ExpertSwitch, QueueSample
from daemon.units import utc_text

#: Enough for some minutes at a hundred batches a second.
_BATCHES = 20_000
_LOADS = 5_000
_SAMPLES = 3_600
#: Most entries of one answer; older ones are left out.
_MAX_ENTRIES = 1_000
MAX_WINDOW_S = 3600.0
_HOUR_S, _MINUTE_S = 3600.0, 60.0
#: Most pairs of source and code; the least recently rejected one makes room.
_MAX_PAIRS = 100


class WorkTimeline:
    """The drive's thread fills it; any thread may read it."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        # No lock of their own: under the interpreter's, `append` and `list` of a deque are each one step.
        self.batches: deque[BatchDone] = deque(maxlen=_BATCHES)
        self.loads: deque[ExpertSwitch] = deque(maxlen=_LOADS)
        self.samples: deque[QueueSample] = deque(maxlen=_SAMPLES)

    def work(self, seconds: float) -> dict[str, Any]:
        """Answer control's `timeline`: work that ended in the last `seconds`, timed before `at`; `more` if not all."""
        now_s = self._wall()
        batches = [batch for batch in list(self.batches) if batch.ended_wall_s >= now_s - seconds]
        loads = [load for load in list(self.loads) if load.at_wall_s >= now_s - seconds]
        return {
            "at": utc_text(now_s),
            "seconds": seconds,
            "batches": [_batch(batch, now_s) for batch in batches[-_MAX_ENTRIES:]],
            "loads": [_load(load, now_s) for load in loads[-_MAX_ENTRIES:]],
            "more": max(len(batches), len(loads)) > _MAX_ENTRIES,
        }

    def waits(self, seconds: float) -> dict[str, Any]:
        """Answer control's `waits`: samples of the queues, each of which holds until the next."""
        now_s = self._wall()
        samples = list(self.samples)
        before = sum(sample.at_wall_s < now_s - seconds for sample in samples)
        shown = [_sample(sample, now_s) for sample in samples[max(0, before - 1) :]]
        return {"at": utc_text(now_s), "seconds": seconds, "samples": shown}


@dataclass(slots=True)
class _Pair:
    """Counts by minute, oldest first, and the newest reason."""

    minutes: deque[list[int]] = field(default_factory=lambda: deque[list[int]](maxlen=int(_HOUR_S / _MINUTE_S)))
    reason: str = ""
    at_s: float = 0.0


class Rejections:
    """Rejected messages of the last hour by source and code (metrics.py counts no sources)."""

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
            if not pair.minutes or pair.minutes[-1][0] != minute:
                pair.minutes.append([minute, 0])
            pair.minutes[-1][1] += 1
            while len(self._pairs) > _MAX_PAIRS:
                del self._pairs[next(iter(self._pairs))]

    def rows(self) -> list[dict[str, Any]]:
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


def _batch(batch: BatchDone, now_s: float) -> dict[str, Any]:
    return {
        **{name: getattr(batch, name) for name in ("executor", "device", "expert", "images")},
        "began_s": round(now_s - batch.started_wall_s, 4),
        "ended_s": round(now_s - batch.ended_wall_s, 4),
        "load_ms": round(batch.load_ms, 2),
    }


def _load(switch: ExpertSwitch, now_s: float) -> dict[str, Any]:
    return {
        "pool": switch.executor,
        "device": switch.device,
        "expert": switch.loaded,
        **{name: getattr(switch, name) for name in ("bytes", "tier", "cause")},
        "began_s": round(now_s - switch.at_wall_s + switch.load_ms / 1000, 4),
        "ended_s": round(now_s - switch.at_wall_s, 4),
    }


def _sample(sample: QueueSample, now_s: float) -> dict[str, Any]:
    row = asdict(sample)
    return {"ago_s": round(now_s - row.pop("at_wall_s"), 3), **row}
