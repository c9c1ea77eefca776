"""Measures an expert on pictures held out: escapes and false calls with intervals, and the most so few can show."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.training.fit import Targets

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
    """Mistakes among pictures held out."""

    count: int
    of: int

    @property
    def share(self) -> float:
        return self.count / max(self.of, 1)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of Clopper and Pearson, as shares; all of 0..1 without pictures."""
        if self.of == 0:
            return 0.0, 1.0
        from scipy.stats import binomtest

        interval = binomtest(self.count, self.of).proportion_ci(_CONFIDENCE, method="exact")
        return float(interval.low), float(interval.high)

    def __str__(self) -> str:
        """Return it for a person: `2 of 25, 8 % (1 to 26)`."""
        if self.of == 0:
            return "unknown"
        low, high = self.interval
        return f"{self.count} of {self.of}, {self.share:.1%} ({low * 100:.1f} to {high * 100:.1f})".replace("%", " %")


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
        """Return the defects that it passes."""
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
    """Return the most that so many good and defective pictures can show, and how many more could show 5 %."""
    wanted = math.ceil(math.log((1 - _CONFIDENCE) / 2) / math.log(1 - _AIM))
    counts = {"good": (good, "false calls"), "defective": (defective, "escapes")}
    counts = {which: each for which, each in counts.items() if each[0]}
    shown = " or ".join(f"{Rate(0, count).interval[1] * 100:.1f} % {what}" for count, what in counts.values())
    text = f"{' and '.join(f'{count} {which}' for which, (count, _) in counts.items())} pictures cannot show fewer than"
    more = " and ".join(f"{wanted - count} more {which}" for which, (count, _) in counts.items() if count < wanted)
    advice = f"; {more} pictures could show {_AIM * 100:.0f} %" if more else ""
    return f"{text} {shown}, even without a mistake{advice}"


def wilson(count: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of Wilson's score, as shares; all of 0..1 of nothing."""
    if of == 0:
        return 0.0, 1.0
    z = 1.959964
    centre, spread = (
        count / of + z * z / (2 * of),
        z * math.sqrt(count / of * (1 - count / of) / of + (z / (2 * of)) ** 2),
    )
    low, high = (centre - spread) / (1 + z * z / of), (centre + spread) / (1 + z * z / of)
    return round(max(low, 0.0), 6), round(min(high, 1.0), 6)
