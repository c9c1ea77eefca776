"""BrownoutServe's decisions: which experts run themselves (§IV.C), and a threshold that follows latency (§IV.E).

Line 10 of Algorithm 1 tests the sum before it adds anything, which would send the busiest experts away. The worked
example is right: 12 of 20 tokens are the three busiest experts'.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: Products of a threshold and a count are not exact: 100 × 0.55 is a little more than 55, and would ask for more.
_ROUNDING = 1e-9

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """Division of one layer's experts in one step. Experts without tokens appear nowhere."""

    #: Experts that run themselves, ascending.
    originals: tuple[int, ...]
    #: Groups whose united expert runs, ascending, each with the experts that it replaces.
    united: tuple[tuple[int, tuple[int, ...]], ...] = ()
    #: Experts whose tokens are ignored in this layer (full brownout), ascending.
    dropped: tuple[int, ...] = ()


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


def split(tokens: Sequence[int], threshold: float, groups: Sequence[int] | None) -> ExpertSplit:
    """Divide the experts of a layer.

    `tokens[i]` are the tokens that chose expert i, `groups[i]` is its united expert's group. Without groups (full
    brownout) all but the busiest experts are dropped. At threshold 1 every expert runs itself.
    """
    originals = busiest(tokens, threshold)
    taken = frozenset(originals)
    rest = [expert for expert, count in enumerate(tokens) if count and expert not in taken]
    if groups is None:
        return ExpertSplit(tuple(sorted(originals)), dropped=tuple(rest))
    members: dict[int, list[int]] = {}
    for expert in rest:
        members.setdefault(groups[expert], []).append(expert)
    # An expert alone in its group runs itself: its united expert would save no access.
    alone = [experts[0] for experts in members.values() if len(experts) == 1]
    united = [(group, tuple(experts)) for group, experts in sorted(members.items()) if len(experts) > 1]
    return ExpertSplit(tuple(sorted([*originals, *alone])), tuple(united))


def groups_in_order(experts: int, way: int) -> tuple[int, ...]:
    """Return the group of each expert, with `way` neighbours by index in each group (BrownoutServe §IV.B)."""
    return tuple(expert // way for expert in range(experts))


@dataclass(frozen=True, slots=True)
class SalcRule:
    """Control of one phase. Algorithm 2 with the figures of §V.D; window and interval are ours."""

    slo_s: float
    #: Below this share of the SLO the threshold rises.
    warning_factor: float = 0.8
    shrink_ratio: float = 0.8
    increment: float = 0.1
    #: Latencies older than this do not count.
    window_s: float = 5.0
    #: The threshold changes at most this often.
    interval_s: float = 2.5


class LatencyController:
    """One phase's threshold: 1 at first, shrinking while the 90th percentile of latency is above its SLO."""

    def __init__(self, rule: SalcRule) -> None:
        self.rule = rule
        self.threshold = 1.0
        self._recent: deque[tuple[float, float]] = deque()
        self._checked_s: float | None = None

    def observe(self, latency_s: float, now: float) -> None:
        """Record a token's latency: time to first token in prefill, time per output token in decode."""
        self._recent.append((now, latency_s))

    def p90_s(self, now: float) -> float | None:
        """Return the 90th percentile (nearest rank) of the latencies in the window; None if there are none."""
        while self._recent and self._recent[0][0] <= now - self.rule.window_s:
            self._recent.popleft()
        if not self._recent:
            return None
        ordered = sorted(latency_s for _, latency_s in self._recent)
        return ordered[math.ceil(0.9 * len(ordered)) - 1]

    def check(self, now: float) -> float:
        """Return the threshold from `now` on, changed once per interval at most; no latencies mean no load."""
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
