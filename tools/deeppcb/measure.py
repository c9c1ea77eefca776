"""How good found boxes are, in a data set's own measure: hits, precision, recall, F-score, average precision.

DeepPCB's: a box is a hit if it has a defect's class and overlaps it with an IoU above .33, each defect being hit once.
mAP is the mean over classes of the average precision: the precision at the rank of each hit, summed, over the number
of defects (no interpolation). The F-score needs a confidence to cut at, which is chosen on other images.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: The data set's own bound.
DEEPPCB_IOU = 0.33
#: Confidences tried when a threshold is chosen.
_THRESHOLDS = tuple(round(0.05 + 0.01 * step, 2) for step in range(90))


@dataclass(frozen=True, slots=True)
class Found:
    """What a detector says of one image: boxes (n, 4) x1 y1 x2 y2, classes (n,), confidences (n,)."""

    boxes: NDArray[np.float32]
    classes: NDArray[np.int64]
    confidences: NDArray[np.float32]

    def above(self, threshold: float) -> "Found":
        keep = self.confidences >= threshold
        return Found(self.boxes[keep], self.classes[keep], self.confidences[keep])


@dataclass(frozen=True, slots=True)
class Counts:
    """Boxes that hit, boxes that hit nothing, defects that no box hit."""

    hits: int
    false: int
    missed: int

    @property
    def precision(self) -> float:
        return self.hits / (self.hits + self.false) if self.hits + self.false else 0.0

    @property
    def recall(self) -> float:
        return self.hits / (self.hits + self.missed) if self.hits + self.missed else 0.0

    @property
    def f_score(self) -> float:
        """Harmonic mean of precision and recall."""
        return 2 * self.hits / (2 * self.hits + self.false + self.missed) if self.hits else 0.0


def nothing_found() -> Found:
    return Found(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32))


def overlaps(found: NDArray[np.floating], truth: NDArray[np.floating]) -> NDArray[np.float64]:
    """IoU of (n, 4) with (m, 4) corners: (n, m)."""
    found, truth = found.astype(np.float64), truth.astype(np.float64)
    corner = np.maximum(found[:, None, :2], truth[None, :, :2])
    far = np.minimum(found[:, None, 2:4], truth[None, :, 2:4])
    shared = np.clip(far - corner, 0, None).prod(axis=2)
    areas = [(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) for boxes in (found, truth)]
    union = areas[0][:, None] + areas[1][None] - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def hits(found: Found, truth: NDArray[np.floating], iou: float = DEEPPCB_IOU) -> NDArray[np.bool_]:
    """For each found box whether it hits. truth: (m, 5) rows of x1 y1 x2 y2 class.

    The surest box chooses first: the free defect of its class that it overlaps most.
    """
    result = np.zeros(len(found.confidences), bool)
    shares = overlaps(found.boxes, truth[:, :4])
    shares[found.classes[:, None] != truth[None, :, 4].astype(np.int64)] = 0
    free = np.ones(len(truth), bool)
    for index in np.argsort(-found.confidences, kind="stable"):
        candidates = np.where(free, shares[index], 0)
        if len(candidates) and candidates.max() > iou:
            free[candidates.argmax()] = False
            result[index] = True
    return result


def count(
    found: Sequence[Found], truths: Sequence[NDArray[np.floating]], threshold: float, iou: float = DEEPPCB_IOU
) -> Counts:
    """Over all images, of boxes at least as sure as `threshold`."""
    hit = false = missed = 0
    for one, truth in zip(found, truths, strict=True):
        good = int(hits(one.above(threshold), truth, iou).sum())
        hit += good
        false += int((one.confidences >= threshold).sum()) - good
        missed += len(truth) - good
    return Counts(hit, false, missed)


def choose_threshold(found: Sequence[Found], truths: Sequence[NDArray[np.floating]], iou: float = DEEPPCB_IOU) -> float:
    """The confidence with the best F-score; in the middle of those that are equally good."""
    scores = [count(found, truths, threshold, iou).f_score for threshold in _THRESHOLDS]
    best = [threshold for threshold, score in zip(_THRESHOLDS, scores, strict=True) if score == max(scores)]
    return best[len(best) // 2]


def average_precisions(
    found: Sequence[Found], truths: Sequence[NDArray[np.floating]], classes: int, iou: float = DEEPPCB_IOU
) -> list[float | None]:
    """Per class, None where there is no such defect. Boxes of all images are ranked together by confidence."""
    hit = np.concatenate([hits(one, truth, iou) for one, truth in zip(found, truths, strict=True)])
    confidences = np.concatenate([one.confidences for one in found])
    kinds = np.concatenate([one.classes for one in found])
    wanted = np.concatenate([truth[:, 4] for truth in truths]).astype(np.int64)
    result: list[float | None] = []
    for kind in range(classes):
        defects = int((wanted == kind).sum())
        mine = np.flatnonzero(kinds == kind)
        ranked = hit[mine[np.argsort(-confidences[mine], kind="stable")]]
        precisions = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
        result.append(float(precisions[ranked].sum() / defects) if defects else None)
    return result


def mean_average_precision(precisions: Sequence[float | None]) -> float:
    known = [value for value in precisions if value is not None]
    return sum(known) / len(known) if known else 0.0
