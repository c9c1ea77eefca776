"""The paper's rule for the number of experts in a device's memory (CoServe §4.4), to compare `coserve profile` with.

A window slides over the experts, most used first, and shrinks on the way, as long as throughput grows as a line fitted
to the windows before. The line is over the windows' index: since windows shrink, throughput that is linear in experts
falls short of it, and windows that decay by 15 % never pass 100 experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

#: The paper's first window, experts, and how far throughput may fall short of its trend (§5.3).
INITIAL_WINDOW, MARGIN = 15.0, 0.05


@dataclass(frozen=True, slots=True)
class PaperChoice:
    """Choice of the paper's rule: a number at random within its last `window`; `tried` are all windows' upper ends."""

    experts: int
    images_per_s: float
    window: tuple[int, int]
    tried: dict[int, float]


def paper_choice(throughput: Callable[[int], float], max_experts: int, seed: int = 0) -> PaperChoice:
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
