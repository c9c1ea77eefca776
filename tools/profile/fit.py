"""Fit measured batch latencies: K and B by least squares, and the largest batch that still pays. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

#: The largest useful batch is the smallest whose average latency per image is this close to the best one measured.
PLATEAU = 0.03


@dataclass(frozen=True, slots=True)
class LatencyLine:
    """A batch of n images takes `k_s` · n + `b_s` seconds (CoServe §4.2).

    `residual` is the largest relative error of that line over the measured batches.
    """

    k_s: float
    b_s: float
    residual: float

    def average_s(self, images: int) -> float:
        """Seconds per image in a batch of so many."""
        return self.k_s + self.b_s / images


def fit_line(latencies_s: Mapping[int, float]) -> LatencyLine:
    """Least squares over seconds by batch size; neither constant is below 0, for no batch takes less than nothing.

    Batches are weighted by 1 / latency, so that the line is as right for one image as for many.
    """
    if not latencies_s:
        raise ValueError("expected the latency of at least one batch size")
    sizes = np.array(list(latencies_s), dtype=np.float64)
    seconds = np.array(list(latencies_s.values()), dtype=np.float64)
    if len(sizes) == 1:
        return LatencyLine(float(seconds[0] / sizes[0]), 0.0, 0.0)
    columns = np.stack((sizes / seconds, 1 / seconds), axis=1)
    (k_s, b_s), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    if b_s < 0:
        k_s, b_s = _alone(columns[:, 0]), 0.0
    elif k_s < 0:
        k_s, b_s = 0.0, _alone(columns[:, 1])
    residual = np.abs(columns @ (k_s, b_s) - 1).max()
    return LatencyLine(float(k_s), float(b_s), float(residual))


def largest_useful_batch(line: LatencyLine, largest_measured: int) -> int:
    """The smallest batch whose average latency is within the plateau of that of the largest batch measured.

    Read off the fitted line: single measurements differ by more than the plateau does.
    """
    enough_s = line.average_s(largest_measured) * (1 + PLATEAU)
    return next(images for images in range(1, largest_measured + 1) if line.average_s(images) <= enough_s)


def _alone(column: np.ndarray) -> float:
    """The least squares of one constant for a right side of ones."""
    return float(column.sum() / (column**2).sum())
