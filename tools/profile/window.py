"""Find the number of experts for a device's memory: the decaying-window search (CoServe §4.4). Pure.

A window slides over the experts, most used first, and shrinks on the way. At each upper bound a sample of requests
gives a throughput; while it grows as a line fitted to the earlier ones says, memory for more experts still pays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np

INITIAL_WINDOW = 15.0
MARGIN = 0.05
#: Experts tried within the last window, its bounds among them.
POINTS_WITHIN = 4

Pick = Literal["best", "random"]


@dataclass(frozen=True, slots=True)
class SearchWindow:
    """A range of expert counts, from `lower` to `upper`."""

    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A window, the whole number of experts at its upper bound and their throughput; `expected` is None before a
    line could be fitted.
    """

    window: SearchWindow
    experts: int
    images_per_s: float
    expected: float | None

    def falls_short(self, margin: float) -> bool:
        """(f(N+1) - actual) / f(N+1) > margin (equation 3)."""
        return self.expected is not None and (self.expected - self.images_per_s) > margin * self.expected


@dataclass(frozen=True, slots=True)
class Split:
    """The number of experts to hold. `within` has what was measured in the last window, by number of experts."""

    experts: int
    images_per_s: float
    trials: tuple[Trial, ...]
    within: Mapping[int, float]

    def measured(self) -> dict[int, float]:
        """Images per second by number of experts, everything that was tried."""
        return dict(sorted({**{trial.experts: trial.images_per_s for trial in self.trials}, **self.within}.items()))


def windows(initial: float = INITIAL_WINDOW) -> Iterator[SearchWindow]:
    """0-15, 15-27.75, 27.75-38.59 … for 15: each narrower by `1 - initial / 100` (equation 1). They end before 100."""
    if not 0 < initial < 100:
        raise ValueError(f"expected an initial window between 0 and 100 experts, not {initial:g}")
    lower, width = 0.0, initial
    while True:
        yield SearchWindow(lower, lower + width)
        lower += width
        width *= 1 - initial / 100


def expected_next(throughputs: Sequence[float]) -> float | None:
    """Extrapolate the next throughput from a line through the first N (equation 2); None for fewer than two."""
    if len(throughputs) < 2:
        return None
    k, b = np.polyfit(np.arange(1, len(throughputs) + 1), np.asarray(throughputs), 1)
    return float(k * (len(throughputs) + 1) + b)


def search(
    throughput: Callable[[int], float],
    max_experts: int,
    *,
    initial: float = INITIAL_WINDOW,
    margin: float = MARGIN,
    pick: Pick = "best",
    seed: int = 0,
) -> Split:
    """Slide the window until throughput falls short of the trend, then choose within that window.

    `throughput` runs a sample with so many experts' memory; it is asked once per number. `max_experts` is what the
    catalog has, or the memory holds: the window ends there, or where it has become narrower than one expert.
    """
    if max_experts < 1:
        raise ValueError("expected memory for at least one expert")
    speeds: dict[int, float] = {}

    def measured(experts: int) -> float:
        if experts not in speeds:
            speeds[experts] = throughput(experts)
        return speeds[experts]

    trials: list[Trial] = []
    for window in windows(initial):
        upper = min(max_experts, max(1, round(window.upper)))
        if trials and upper <= trials[-1].experts:
            break
        expected = expected_next([trial.images_per_s for trial in trials])
        trials.append(Trial(window, upper, measured(upper), expected))
        if trials[-1].falls_short(margin) or upper == max_experts:
            break
    last, lowest = trials[-1], trials[-2].experts if len(trials) > 1 else 1
    if pick == "random":
        count = Random(seed).randint(lowest, last.experts)
        return Split(count, measured(count), tuple(trials), {count: measured(count)})
    points = np.linspace(lowest, last.experts, POINTS_WITHIN).round().astype(int)
    within = {int(experts): measured(int(experts)) for experts in points}
    # Of equals the fewest: what experts do not need, batches may have.
    count = max(within, key=lambda experts: (within[experts], -experts))
    return Split(count, within[count], tuple(trials), within)
