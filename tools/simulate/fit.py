"""Fit measured batch latencies: K and B by least squares, and the largest batch that still pays. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

#: The largest useful batch is the smallest whose average latency per image is this close to the best one measured.
PLATEAU = 0.03


@dataclass(frozen=True, slots=True)
class LatencyLine:
    """A batch of n takes `k_s` · n + `b_s` seconds (CoServe §4.2); `residual` is the largest relative error."""

    k_s: float
    b_s: float
    residual: float

    def average_s(self, images: int) -> float:
        return self.k_s + self.b_s / images


def fit_line(batches: Iterable[tuple[int, float]], known: tuple[float, float] = (1.0, 0.0)) -> LatencyLine:
    """Fit (images, seconds) by least squares; neither constant may be negative.

    Batches are weighted by 1 / seconds, so that the line is as right for one image as for many. Batches of one size
    only cannot tell K from B: then the proportion of the `known` K and B is kept.
    """
    from scipy.optimize import nnls

    sizes, seconds = np.array(list(batches), dtype=np.float64).reshape(-1, 2).T
    columns = np.stack((sizes / seconds, 1 / seconds), axis=1)
    if len(np.unique(sizes)) == 1:
        alone = columns @ known
        k_s, b_s = alone.sum() / (alone**2).sum() * np.array(known)
    else:
        (k_s, b_s), _ = nnls(columns, np.ones_like(seconds))
    residual = np.abs(columns @ (k_s, b_s) - 1).max()
    return LatencyLine(float(k_s), float(b_s), float(residual))


def largest_useful_batch(line: LatencyLine, largest_measured: int) -> int:
    """Return the smallest batch whose latency per image is close to that of the largest batch measured.

    Read off the fitted line: single measurements differ by more than the plateau does.
    """
    enough_s = line.average_s(largest_measured) * (1 + PLATEAU)
    return next(images for images in range(1, largest_measured + 1) if line.average_s(images) <= enough_s)
