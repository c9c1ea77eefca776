"""Detects pictures that cannot be judged, by limits learned from the pictures that an expert was trained on.

Exposure, sharpness and stripes are measured on the pixels of its input, so that every expert can have such limits.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from experts.spec import PictureLimits
from experts.vision.preprocess import Image

#: Larger inputs are sampled: every second pixel, or fewer, shows exposure, stripes and noise as well.
_MOST_PIXELS = 256
#: Levels that a row or column varies by, at most, where a picture shows nothing: a sensor's noise in the dark.
_NOTHING_LEVELS = 4
#: How much brighter, darker, sharper or softer than all training pictures a picture may be, and how much more if there
#: was only one of these; constant rows that it may have beyond theirs.
_FACTOR, _FEW, _FURTHER_ROWS = 1.25, 2.0, 0.1


def picture_figures(pictures: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return (B, 3), brightness, sharpness and the share of constant rows or columns, of (B, S, S, 3) uint8 RGB.

    The green channel suffices. Sharpness is the mean step between neighbours.
    """
    every = -(-pictures.shape[1] // _MOST_PIXELS)
    green = np.ascontiguousarray(pictures[:, ::every, ::every, 1])
    pairs = ((green[:, 1:], green[:, :-1]), (green[:, :, 1:], green[:, :, :-1]))
    steps = [(np.maximum(a, b) - np.minimum(a, b)).mean((1, 2)) for a, b in pairs]
    constant = [(green.max(axis) - green.min(axis) <= _NOTHING_LEVELS).mean(1) for axis in (1, 2)]
    return np.stack((green.mean((1, 2)), sum(steps) / 2, np.maximum(*constant)), 1)


def learn_limits(pictures: Iterable[Image]) -> PictureLimits:
    """Return the limits of an expert that learned from pictures (S, S, 3) uint8 RGB; one at least."""
    figures = np.concatenate([picture_figures(picture[None]) for picture in pictures])
    factor = _FACTOR + _FEW / len(figures)
    least, most = figures.min(0) / factor, figures.max(0) * factor
    brightness, sharpness = ((round(float(least[n]), 2), round(float(most[n]), 2)) for n in (0, 1))
    return PictureLimits(brightness, sharpness, round(min(float(figures[:, 2].max()) + _FURTHER_ROWS, 1.0), 2))


def cannot_be_judged(figures: NDArray[np.float64], limits: PictureLimits) -> bool:
    """Return True if the figures (3,) of a picture lie outside its expert's limits."""
    brightness, sharpness, constant = figures.tolist()
    (darkest, brightest), (softest, sharpest) = limits.brightness, limits.sharpness
    return not (darkest <= brightness <= brightest and softest <= sharpness <= sharpest and constant <= limits.constant)
