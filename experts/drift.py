"""Compare an expert's recent answers with those on the images that it was measured on. No torch, no database.

With other light, suppliers or cameras than it was trained for, an expert becomes less sure long before anybody finds
its errors. Training stores its confidences on held-out images by answered label (`confidences` in the catalog); the
results have today's. Comparing label by label keeps a change in the rate of defects from looking like another camera.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

#: Equal bins of confidence from 0 to 1.
BINS = 20
#: The upper edge of each bin but the last: what lies on an edge belongs to the bin above it.
EDGES = tuple((number + 1) / BINS for number in range(BINS - 1))
#: Answers that a comparison looks back on.
RECENT_ANSWERS = 1000
#: In place of a label: all answers together.
ALL = "all"

Grade = Literal["stable", "shifting", "drifted", "too few"]
Lacks = Literal["answers", "images held out"]
Histograms = Mapping[str, Sequence[int]]
_SHIFTING, _DRIFTED = 0.1, 0.25
#: Normal quantile: by chance one of two thousand comparisons exceeds the limit, because a line has many experts.
_QUANTILE = 3.29
#: Added to each bin that either side has, so that a bin that one side lacks does not weigh infinitely.
_SMOOTHING = 0.5


@dataclass(frozen=True, slots=True)
class Drift:
    """Distance of recent answers from training's, over `answers` of them and `held_out` images of training.

    `noise` is the average value if nothing had changed, `chance` a value that chance alone hardly ever exceeds; a
    smaller one is "stable". If the noise alone reaches "shifting", the grade is "too few" and `lacks` names what is
    missing: answers, which come with time, or held-out images, which must be measured.
    """

    value: float
    grade: Grade
    answers: int
    held_out: int
    noise: float
    chance: float = 0.0
    lacks: Lacks | None = None


def histogram(confidences: Iterable[float]) -> tuple[int, ...]:
    """Count the confidences in `BINS` equal bins."""
    counts = [0] * BINS
    for confidence in confidences:
        counts[bisect_right(EDGES, confidence)] += 1
    return tuple(counts)


def histograms(answers: Iterable[tuple[str | None, float | None]]) -> dict[str, tuple[int, ...]]:
    """Count (label, confidence) answers by label; answers without them (nothing detected) do not count."""
    by_label: dict[str, list[float]] = {}
    for label, confidence in answers:
        if label is not None and confidence is not None:
            by_label.setdefault(label, []).append(confidence)
    return {label: histogram(confidences) for label, confidences in sorted(by_label.items())}


def drift(training: Sequence[int], recent: Sequence[int]) -> float:
    """Return the population stability index: sum of (r - t) ln(r / t) over the bins' shares; 0 if a side is empty."""
    if not sum(training) or not sum(recent):
        return 0.0
    bins = [(t, r) for t, r in zip(training, recent, strict=True) if t or r]
    of_training = sum(training) + _SMOOTHING * len(bins)
    of_recent = sum(recent) + _SMOOTHING * len(bins)
    shares = [((t + _SMOOTHING) / of_training, (r + _SMOOTHING) / of_recent) for t, r in bins]
    return sum((r - t) * math.log(r / t) for t, r in shares)


def grade(value: float) -> Grade:
    return "stable" if value < _SHIFTING else "shifting" if value < _DRIFTED else "drifted"


def compare(training: Histograms, recent: Histograms) -> Drift:
    """Compare by label, weighted by today's answers; leave out labels hardly answered on held-out images."""
    if ALL in training:
        training, recent = {ALL: training[ALL]}, {ALL: tuple(map(sum, zip([0] * BINS, *recent.values(), strict=True)))}
    answers = sum(map(sum, recent.values()))
    held_out = sum(map(sum, training.values()))
    value = noise = spread = weight = unknown = 0.0
    for label, counts in recent.items():
        of_training, now = training.get(label, ()), sum(counts)
        if not now:
            continue
        by_chance = _noise(of_training, counts) if sum(of_training) else _SHIFTING
        if by_chance >= _SHIFTING:
            unknown += now if _lacks_held_out(of_training, counts) else 0
            continue
        weight += now
        value += now * drift(of_training, counts)
        noise += now * by_chance
        spread += (now * by_chance) ** 2 * 2 / max(1, _bins(of_training, counts) - 1)
    # Where most answers are of labels that cannot be compared, the rest does not speak for the expert.
    if weight < answers / 2 or not answers:
        lacks: Lacks = "images held out" if unknown and unknown >= (answers - weight) / 2 else "answers"
        return Drift(0.0, "too few", answers, held_out, noise=_SHIFTING, lacks=lacks)
    value, chance = value / weight, _chance(noise / weight, spread / weight**2)
    return Drift(value, grade(value) if value > chance else "stable", answers, held_out, noise / weight, chance)


def _chance(mean: float, variance: float) -> float:
    """Return the value that chance hardly ever exceeds: a scaled chi-square with these moments (Wilson, Hilferty)."""
    if not variance:
        return mean
    ninth = variance / (9 * mean**2)  # 2 / (9 degrees of freedom)
    return mean * (1 - ninth + _QUANTILE * math.sqrt(ninth)) ** 3


def _noise(training: Sequence[int], recent: Sequence[int]) -> float:
    """Return the mean index of two samples of one distribution: degrees of freedom times (1/n + 1/m)."""
    return (_bins(training, recent) - 1) * (1 / sum(training) + 1 / sum(recent))


def _lacks_held_out(training: Sequence[int], recent: Sequence[int]) -> bool:
    return _bins(training or [0] * BINS, recent) / sum(recent) < _SHIFTING and sum(training) < sum(recent)


def _bins(training: Sequence[int], recent: Sequence[int]) -> int:
    return sum(1 for t, r in zip(training, recent, strict=True) if t or r)
