"""SLO-aware latency control: the brownout threshold follows the latency of the recent past (BrownoutServe §IV.E)."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class SalcRule:
    """How one phase is controlled. Algorithm 2 with the figures of §V.D; the window and the interval are ours."""

    slo_s: float
    #: Latency below this share of the SLO gives accuracy back.
    warning_factor: float = 0.8
    shrink_ratio: float = 0.8
    increment: float = 0.1
    #: Latencies older than this do not count.
    window_s: float = 5.0
    #: The threshold changes at most this often.
    interval_s: float = 2.5


class LatencyController:
    """The threshold of one phase: 1 at first, less while the 90th percentile is above the SLO."""

    def __init__(self, rule: SalcRule) -> None:
        self.rule = rule
        self.threshold = 1.0
        self._recent: deque[tuple[float, float]] = deque()
        self._checked_s: float | None = None

    def observe(self, latency_s: float, now: float) -> None:
        """A token took `latency_s`: time to first token in prefill, time per output token in decode."""
        self._recent.append((now, latency_s))

    def p90_s(self, now: float) -> float | None:
        """The 90th percentile (nearest rank) of the latencies in the window; None where there were none."""
        while self._recent and self._recent[0][0] <= now - self.rule.window_s:
            self._recent.popleft()
        if not self._recent:
            return None
        ordered = sorted(latency_s for _, latency_s in self._recent)
        return ordered[math.ceil(0.9 * len(ordered)) - 1]

    def check(self, now: float) -> float:
        """The threshold from `now` on. Called as often as one likes: it changes once per interval.

        A window without latencies is one without load, so it counts as far below the SLO.
        """
        if self._checked_s is None:
            self._checked_s = now
        if now - self._checked_s < self.rule.interval_s:
            return self.threshold
        self._checked_s = now
        latency_s = self.p90_s(now) or 0.0
        if latency_s < self.rule.slo_s * self.rule.warning_factor:
            # Sums of tenths are not exact, and only exactly 1 runs every expert itself.
            self.threshold = min(1.0, round(self.threshold + self.rule.increment, 9))
        elif latency_s > self.rule.slo_s:
            self.threshold *= self.rule.shrink_ratio
        return self.threshold


class Salc:
    """Both phases, each with its own SLO, window and threshold."""

    def __init__(self, prefill: SalcRule, decode: SalcRule) -> None:
        self.phases: dict[Phase, LatencyController] = {
            "prefill": LatencyController(prefill),
            "decode": LatencyController(decode),
        }

    def observe(self, phase: Phase, latency_s: float, now: float) -> None:
        self.phases[phase].observe(latency_s, now)

    def check(self, now: float) -> dict[Phase, float]:
        """The threshold of each phase from `now` on."""
        return {phase: controller.check(now) for phase, controller in self.phases.items()}
