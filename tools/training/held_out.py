"""Measures an expert on pictures held out.

Of a classifier: escapes and false calls with intervals, and the most so few can show. Of a detector: a box is a hit if
it has the class of a labelled object and overlaps it with an IoU above a bound; each object is hit once. The average
precision of a class is the precision at the rank of each hit, summed, over the number of its objects (no
interpolation); mAP is the mean over the classes. The F-score needs a confidence to cut at: `best_threshold`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.training.fit import Targets

#: Confidences tried when a detector's threshold is chosen.
_THRESHOLDS = tuple(round(0.05 + 0.01 * step, 2) for step in range(90))
#: Interval and claims: 19 of 20 are right.
_CONFIDENCE = 0.95
#: One candidate beats another if chance alone would do so in fewer than 1 of 20 cases.
_CHANCE = 0.05
#: The least probability of the good label that is a pass.
_PASSES = 0.5
#: The share of escapes or false calls that the advice on more pictures aims at.
_AIM = 0.05


@dataclass(frozen=True, slots=True)
class Rate:
    count: int
    of: int

    @property
    def share(self) -> float:
        return self.count / max(self.of, 1)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of Clopper and Pearson, as shares of six digits; all of 0..1 of nothing."""
        if self.of == 0:
            return 0.0, 1.0
        from scipy.stats import binomtest

        low, high = binomtest(self.count, self.of).proportion_ci(_CONFIDENCE)
        return round(float(low), 6), round(float(high), 6)

    def __str__(self) -> str:
        """Return it for a person: `2 of 25, 8 % (1 to 26)`."""
        if self.of == 0:
            return "unknown"
        low, high = self.interval
        share = f"{self.share * 100:.1f} %"
        return f"{self.count} of {self.of}, {share} ({low * 100:.1f} to {high * 100:.1f})"


@dataclass(frozen=True, slots=True)
class HeldOutAnswers:
    """Answers to pictures that the answering network was not trained on.

    shares: (N, classes) probabilities; `good` is the label that passes, from a probability of one half on
    (`review_below` of the rules, unless a person sets another). `rows` are the pictures' among those of the folder.
    """

    shares: NDArray[np.float32]
    targets: Targets
    good: int | None
    rows: NDArray[np.int64]

    @property
    def right(self) -> NDArray[np.bool_]:
        """Return True for each right answer: of the label, or, where one label passes, of passing or not."""
        if self.good is None:
            return self.shares.argmax(1) == self.targets
        return (self.shares[:, self.good] >= _PASSES) == (self.targets == self.good)

    @property
    def escapes(self) -> Rate:
        bad = self.targets != self.good
        return Rate(int((bad & ~self.right).sum()), int(bad.sum()))

    @property
    def false_calls(self) -> Rate:
        """Return the good pictures that it does not pass."""
        good = self.targets == self.good
        return Rate(int((good & ~self.right).sum()), int(good.sum()))

    @property
    def auroc(self) -> float | None:
        """Return how well it ranks: the share of pairs of a good and a bad picture in the right order; None without."""
        if self.good is None:
            return None
        scores = 1 - self.shares[:, self.good]
        bad, good = scores[self.targets != self.good, None], scores[None, self.targets == self.good]
        return float(((bad > good) + 0.5 * (bad == good)).mean()) if bad.size and good.size else None

    def confusion(self) -> NDArray[np.int64]:
        """Return (classes, classes) counts: rows are the truth, columns the answers."""
        classes = self.shares.shape[1]
        counts = np.bincount(self.targets * classes + self.shares.argmax(1), minlength=classes**2)
        return counts.reshape(classes, classes)

    def worst(self, count: int) -> list[int]:
        """Return the pictures whose true label got the least share, worst first."""
        own = self.shares[np.arange(len(self.targets)), self.targets]
        return [int(place) for place in np.argsort(own, kind="stable")[:count]]


def beats(one: HeldOutAnswers, other: HeldOutAnswers) -> bool:
    """Return True if `one` is right so often where `other` is wrong that it is not chance (McNemar's exact test)."""
    won, lost = int((one.right & ~other.right).sum()), int((~one.right & other.right).sum())
    if won <= lost:
        return False
    from scipy.stats import binomtest

    return float(binomtest(won, won + lost, alternative="greater").pvalue) < _CHANCE


def may_be_beaten(answers: HeldOutAnswers) -> bool:
    """Return True if an expert without a mistake would beat this one."""
    return 0.5 ** int((~answers.right).sum()) < _CHANCE


def claims(good: int, defective: int) -> str:
    """Say what these numbers of pictures can show at most, and how many more could show 5 %."""
    wanted = math.ceil(math.log((1 - _CONFIDENCE) / 2) / math.log(1 - _AIM))
    counts = {"good": (good, "false calls"), "defective": (defective, "escapes")}
    counts = {which: each for which, each in counts.items() if each[0]}
    shown = " or ".join(f"{Rate(0, count).interval[1] * 100:.1f} % {what}" for count, what in counts.values())
    text = f"{' and '.join(f'{count} {which}' for which, (count, _) in counts.items())} pictures cannot show fewer than"
    more = " and ".join(f"{wanted - count} more {which}" for which, (count, _) in counts.items() if count < wanted)
    advice = f"; {more} pictures could show {_AIM * 100:.0f} %" if more else ""
    return f"{text} {shown}, even without a mistake{advice}"


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
        return 2 * self.hits / max(2 * self.hits + self.false + self.missed, 1)


@dataclass(frozen=True, slots=True)
class MatchedBoxes:
    """The boxes of all images, each with its class, its confidence and True if it is a hit; the objects' classes."""

    classes: NDArray[np.int64]
    confidences: NDArray[np.float32]
    hits: NDArray[np.bool_]
    object_classes: NDArray[np.int64]

    def counts(self, threshold: float) -> BoxCounts:
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
