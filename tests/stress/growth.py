"""The trend of a figure that was sampled."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

_CONFIDENCE = 0.95
#: Neighbouring samples of memory are nearly the same: only the means of so many blocks count as independent.
_BLOCKS = 30


class Slope(NamedTuple):
    """Growth per hour, and the bounds between which it lies with 95 % confidence; infinite where samples are few."""

    per_hour: float
    lowest: float
    highest: float

    def is_flat(self, tolerance_per_hour: float) -> bool:
        """Return True if growth beyond the tolerance is not shown."""
        return self.per_hour <= tolerance_per_hour or self.lowest <= 0


def slope(at_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Fit a straight line by least squares over the means of blocks of samples."""
    blocks = min(_BLOCKS, len(at_s))
    if blocks < 3:
        return Slope(0.0, -math.inf, math.inf)
    hours = [float(np.mean(block)) / 3600 for block in np.array_split(np.asarray(at_s), blocks)]
    means = [float(np.mean(block)) for block in np.array_split(np.asarray(values), blocks)]
    if max(means) == min(means):
        return Slope(0.0, 0.0, 0.0)
    fit: Any = stats.linregress(hours, means)
    margin = float(stats.t.ppf((1 + _CONFIDENCE) / 2, blocks - 2)) * float(fit.stderr)
    return Slope(float(fit.slope), float(fit.slope) - margin, float(fit.slope) + margin)
