"""Precision, recall, F-score and average precision of a detector's boxes on labelled images.

A box is a hit if it has the class of a labelled object and overlaps it with an IoU above a bound; each object is hit
once. The average precision of a class is the precision at the rank of each hit, summed, over the number of its objects
(no interpolation); mAP is the mean over the classes. The F-score needs a confidence to cut at: `best_threshold`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Confidences tried when a threshold is chosen.
_THRESHOLDS = tuple(round(0.05 + 0.01 * step, 2) for step in range(90))


@dataclass(frozen=True, slots=True)
class ImageBoxes:
    """A detector's answer to one image: boxes (n, 4) x1 y1 x2 y2, classes (n,), confidences (n,)."""

    boxes: NDArray[np.float32]
    classes: NDArray[np.int64]
    confidences: NDArray[np.float32]

    def one_per_place(self, iou: float) -> "ImageBoxes":
        """Return the boxes that no surer one, of whatever class, overlaps with more than `iou`."""
        shares, kept = overlaps(self.boxes, self.boxes), list[int]()
        for index in np.argsort(-self.confidences, kind="stable"):
            if not len(kept) or shares[index, kept].max() <= iou:
                kept.append(int(index))
        rows = np.array(kept, np.int64)
        return ImageBoxes(self.boxes[rows], self.classes[rows], self.confidences[rows])


@dataclass(frozen=True, slots=True)
class BoxCounts:
    """Boxes that hit an object, boxes that hit none, objects that no box hit."""

    hits: int
    false: int
    missed: int

    @property
    def precision(self) -> float:
        return self.hits / max(self.hits + self.false, 1)

    @property
    def recall(self) -> float:
        return self.hits / max(self.hits + self.missed, 1)

    @property
    def f_score(self) -> float:
        """Harmonic mean of precision and recall."""
        return 2 * self.hits / max(2 * self.hits + self.false + self.missed, 1)


@dataclass(frozen=True, slots=True)
class MatchedBoxes:
    """The boxes of all images, each with its class, its confidence and True if it is a hit; the objects' classes."""

    classes: NDArray[np.int64]
    confidences: NDArray[np.float32]
    hits: NDArray[np.bool_]
    object_classes: NDArray[np.int64]

    def counts(self, threshold: float) -> BoxCounts:
        """Count the boxes that are at least as sure as `threshold`."""
        sure = self.confidences >= threshold
        hits = int(self.hits[sure].sum())
        return BoxCounts(hits, int(sure.sum()) - hits, len(self.object_classes) - hits)

    def of_class(self, kind: int) -> "MatchedBoxes":
        boxes, objects = self.classes == kind, self.object_classes == kind
        return MatchedBoxes(
            self.classes[boxes], self.confidences[boxes], self.hits[boxes], self.object_classes[objects]
        )

    def best_threshold(self) -> float:
        """Return the confidence with the best F-score; the middle one of those that are equally good."""
        scores = [self.counts(threshold).f_score for threshold in _THRESHOLDS]
        best = [threshold for threshold, score in zip(_THRESHOLDS, scores, strict=True) if score == max(scores)]
        return best[len(best) // 2]

    def average_precisions(self) -> dict[int, float]:
        """Return the average precision of each class that has objects; all images are ranked together."""
        order = np.argsort(-self.confidences, kind="stable")
        precisions: dict[int, float] = {}
        for kind in np.unique(self.object_classes):
            ranked = self.hits[order[self.classes[order] == kind]]
            precision = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
            precisions[int(kind)] = float(precision[ranked].sum() / (self.object_classes == kind).sum())
        return precisions

    def mean_average_precision(self) -> float:
        return float(np.mean(list(self.average_precisions().values()) or [0.0]))


def match_boxes(answers: Sequence[ImageBoxes], truths: Sequence[NDArray[np.floating]], iou: float) -> MatchedBoxes:
    """Match each image's boxes with its objects; truths: (m, 5) rows of x1 y1 x2 y2 class for each image."""
    return MatchedBoxes(
        np.concatenate([answer.classes for answer in answers]),
        np.concatenate([answer.confidences for answer in answers]),
        np.concatenate([_hits(answer, truth, iou) for answer, truth in zip(answers, truths, strict=True)]),
        np.concatenate([truth[:, 4] for truth in truths]).astype(np.int64),
    )


def _hits(answer: ImageBoxes, truth: NDArray[np.floating], iou: float) -> NDArray[np.bool_]:
    """Return for each box True if it is a hit. The surest box takes the free object that it overlaps most.

    Less sure boxes change nothing for surer ones, so the hits above any threshold are among these.
    """
    hits = np.zeros(len(answer.confidences), bool)
    shares = overlaps(answer.boxes, truth[:, :4])
    shares[answer.classes[:, None] != truth[None, :, 4].astype(np.int64)] = 0
    for index in np.argsort(-answer.confidences, kind="stable"):
        if len(truth) and shares[index].max() > iou:
            shares[:, shares[index].argmax()] = 0
            hits[index] = True
    return hits


def overlaps(first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the IoU of (n, 4) with (m, 4) corners: (n, m)."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    near = np.maximum(first[:, None, :2], second[None, :, :2])
    far = np.minimum(first[:, None, 2:4], second[None, :, 2:4])
    shared = np.clip(far - near, 0, None).prod(axis=2)
    areas = [(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) for boxes in (first, second)]
    union = areas[0][:, None] + areas[1][None] - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
