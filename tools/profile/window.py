"""Choose the number of experts for a device's memory by trying numbers out; and the paper's rule, to compare. Pure.

The paper (CoServe §4.4) slides a window over the experts, most used first, which shrinks on the way, as long as
throughput grows as a line fitted to the windows before. The line is over the windows' index: since windows shrink,
throughput that is linear in experts falls short of it, and windows that decay by 15 % never pass 100 experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

#: The paper's first window, experts, and how far throughput may fall short of its trend (§5.3).
INITIAL_WINDOW, MARGIN = 15.0, 0.05
#: Numbers tried at equal distances, both ends among them, before the search goes on around the best.
_FIRST_POINTS = 9

Throughput = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class PaperChoice:
    """Choice of the paper's rule: a number at random within its last `window`; `tried` are all windows' upper ends."""

    experts: int
    images_per_s: float
    window: tuple[int, int]
    tried: dict[int, float]


def best_count(throughput: Throughput, lowest: int, highest: int) -> dict[int, float]:
    """Return throughput by number of experts, the best first: both ends, numbers between, and those around the best.

    Each number is measured once. Of equals the fewest comes first: what experts do not need, batches may have.
    """
    if not 1 <= lowest <= highest:
        raise ValueError(f"expected memory for at least one expert, not for {lowest} to {highest}")
    speeds: dict[int, float] = {}
    untried = {round(number) for number in np.linspace(lowest, highest, _FIRST_POINTS)}
    while untried:
        speeds |= {number: throughput(number) for number in sorted(untried)}
        best, tried = _ranked(speeds)[0], sorted(speeds)
        place = tried.index(best)
        neighbours = tried[max(place - 1, 0)], tried[min(place + 1, len(tried) - 1)]
        untried = {(best + neighbour) // 2 for neighbour in neighbours} - speeds.keys()
    return {number: speeds[number] for number in _ranked(speeds)}


def _ranked(speeds: dict[int, float]) -> list[int]:
    return sorted(speeds, key=lambda number: (-speeds[number], number))


def paper_choice(throughput: Throughput, max_experts: int, seed: int = 0) -> PaperChoice:
    """Slide the window until throughput falls short of the trend, then choose at random within that window.

    0-15, 15-27.75, 27.75-38.59 …: each is narrower by the decay factor (equation 1). It ends at `max_experts`, or where
    it has become narrower than one expert.
    """
    tried: dict[int, float] = {}
    lowest, upper, width = 1, INITIAL_WINDOW, INITIAL_WINDOW
    while (count := min(max_experts, max(1, round(upper)))) not in tried:
        expected = 0.0
        if len(tried) > 1:  # the line of equation 2, through all before
            expected = float(np.polyval(np.polyfit(range(len(tried)), list(tried.values()), 1), len(tried)))
        lowest = max(tried, default=1)
        tried[count] = throughput(count)
        if expected - tried[count] > MARGIN * expected:  # equation 3
            break
        width *= 1 - INITIAL_WINDOW / 100
        upper += width
    window = lowest, max(tried)
    experts = Random(seed).randint(*window)
    return PaperChoice(experts, throughput(experts), window, tried)
