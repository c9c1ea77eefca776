"""BrownoutServe's decisions: which experts run themselves (§IV.C), and a threshold that follows latency (§IV.E).

Line 10 of Algorithm 1 tests the sum before it adds anything, which would send the busiest experts away. The worked
example is right: 12 of 20 tokens are the three busiest experts'.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

#: Products of a threshold and a count are not exact: 100 × 0.55 is a little more than 55, and would ask for more.
_ROUNDING = 1e-9

#: Control of a threshold with the figures of §V.D: below this share of the SLO it rises, above the SLO it shrinks.
_WARNING_FACTOR, _INCREMENT, _SHRINK_RATIO = 0.8, 0.1, 0.8
#: Ours: latencies older than the window do not count; the threshold changes at most once in an interval.
WINDOW_S, INTERVAL_S = 5.0, 2.5

Phase = Literal["prefill", "decode"]


def busiest(tokens: Sequence[int], threshold: float) -> tuple[int, ...]:
    """Return the fewest experts that hold `threshold` of all tokens, most tokens first, ties by index."""
    target = sum(tokens) * threshold - _ROUNDING * sum(tokens)
    experts: list[int] = []
    total = 0
    for expert in sorted(range(len(tokens)), key=lambda expert: (-tokens[expert], expert)):
        if total >= target or tokens[expert] == 0:
            break
        experts.append(expert)
        total += tokens[expert]
    return tuple(experts)


def redirect(tokens: Sequence[int], threshold: float, groups: Sequence[int] | None) -> list[int]:
    """Return the numbers that compute the tokens of each of E experts, and of the sentinel.

    `tokens[i]` are the tokens that chose expert i, `groups[i]` is its united expert's group. The number is the expert's
    own, E + 1 + g for the united expert of group g, or the sentinel E: without groups (full brownout) the tokens of all
    but the busiest experts are ignored. At threshold 1 every expert runs itself.
    """
    experts = len(tokens)
    taken = frozenset(busiest(tokens, threshold))
    rest = [expert for expert, count in enumerate(tokens) if count and expert not in taken]
    numbers = list(range(experts + 1))
    members = Counter(groups[expert] for expert in rest) if groups else Counter[int]()
    for expert in rest:
        if groups is None:
            numbers[expert] = experts
        elif members[groups[expert]] > 1:  # alone, its united expert would save no access
            numbers[expert] = experts + 1 + groups[expert]
    return numbers


def groups_in_order(experts: int, way: int) -> tuple[int, ...]:
    """Return the group of each expert, with `way` neighbours by index in each group (BrownoutServe §IV.B)."""
    return tuple(expert // way for expert in range(experts))


class LatencyController:
    """One phase's threshold (Algorithm 2): 1 at first, shrinking while the 90th percentile of latency is above its SLO.

    Latencies are times to the first token in prefill, and times per output token in decode.
    """

    def __init__(self, slo_s: float) -> None:
        self.threshold = 1.0
        self._slo_s = slo_s
        self._recent: deque[tuple[float, float]] = deque()
        self._checked_s: float | None = None

    def observe(self, latency_s: float, now: float) -> None:
        self._recent.append((now, latency_s))

    def p90_s(self, now: float) -> float | None:
        """Return the 90th percentile (nearest rank) of the latencies in the window; None if there are none."""
        while self._recent and self._recent[0][0] <= now - WINDOW_S:
            self._recent.popleft()
        if not self._recent:
            return None
        ordered = sorted(latency_s for _, latency_s in self._recent)
        return ordered[math.ceil(0.9 * len(ordered)) - 1]

    def check(self, now: float) -> float:
        """Return the threshold from `now` on, changed once per interval at most; no latencies mean no load."""
        if self._checked_s is None:
            self._checked_s = now
        if now - self._checked_s < INTERVAL_S:
            return self.threshold
        self._checked_s = now
        latency_s = self.p90_s(now) or 0.0
        if latency_s < self._slo_s * _WARNING_FACTOR:
            # Sums of tenths are not exact, and only exactly 1 runs every expert itself.
            self.threshold = min(1.0, round(self.threshold + _INCREMENT, 9))
        elif latency_s > self._slo_s:
            self.threshold *= _SHRINK_RATIO
        return self.threshold
