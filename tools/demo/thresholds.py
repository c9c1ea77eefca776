"""Confidences that divide: which solder defect fails, which answer an operator should see. Chosen on parts held out."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from experts.catalog import Catalog
from experts.slot import SlotPool
from experts.spec import Answer, ExpertId
from experts.vision.infer import infer
from experts.vision.preprocess import fit
from tools.camera.render import part_types
from tools.demo.samples import Sample
from tools.demo.teach import DETECTORS, SharedDetector

_LOWEST, _HIGHEST = 0.4, 0.6
#: Share of good parts that may become a review because their classifier is unsure, and where the limit may lie.
_REVIEWS, _LEAST_REVIEW, _MOST_REVIEW = 0.01, 0.6, 0.88
_BATCH = 16


def choose_all(catalog: Catalog, held_out: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Confidence by detector and label."""
    return {detector.expert: _choose(catalog, detector, held_out) for detector in DETECTORS}


def review_below(catalog: Catalog, held_out: Sequence[Sample]) -> float:
    """The confidence that all but a few good parts reach at their classifiers."""
    sure: list[float] = []
    for name, part in part_types().items():
        mine = [s for s in held_out if s.component == name and s.truth == "ok"]
        answers = _answers(catalog, ExpertId(name), mine)
        sure += [answer.confidence or 0.0 for answer in answers if answer.label == part.labels[0]]
    if not sure:
        return _MOST_REVIEW
    sure.sort()
    return round(min(max(sure[int(len(sure) * _REVIEWS)], _LEAST_REVIEW), _MOST_REVIEW), 2)


def _answers(catalog: Catalog, expert: ExpertId, parts: Sequence[Sample]) -> list[Answer]:
    spec = catalog[expert]
    pool = SlotPool("cpu", spec.weights_bytes)
    pool.load(spec)
    found: list[Answer] = []
    for start in range(0, len(parts), _BATCH):
        batch = [fit(part.pixels, spec.task, spec.input_size) for part in parts[start : start + _BATCH]]
        found += infer(pool.slot(expert), batch)
    return found


def _choose(catalog: Catalog, detector: SharedDetector, held_out: Sequence[Sample]) -> dict[str, float]:
    library = part_types()
    held_out = [s for s in held_out if detector.covers(library[s.component]) and s.marks]
    # Seen from all four sides, for few are held out and solder looks the same from each.
    mine = [replace(s, pixels=np.rot90(s.pixels, turns).copy()) for s in held_out for turns in range(4)]
    answers = _answers(catalog, ExpertId(detector.expert), mine)
    chosen: dict[str, float] = {}
    for label in detector.labels:
        good = [_strongest(a, label) for s, a in zip(mine, answers, strict=True) if s.truth == "ok"]
        bad = [_strongest(a, label) for s, a in zip(mine, answers, strict=True) if s.truth == label]
        chosen[label] = choose(good, bad)
    return chosen


def choose(good: Sequence[float], bad: Sequence[float]) -> float:
    """The confidence that divides the strongest boxes on good parts from those on bad ones.

    An escape weighs as much as two false calls, in shares of all bad and all good parts; among equal confidences the
    middle one, as far from both as can be.
    """
    candidates = [step / 100 for step in range(round(_LOWEST * 100), round(_HIGHEST * 100) + 1)]
    costs = [_share(bad, lambda c, t=t: c < t) + 2 * _share(good, lambda c, t=t: c >= t) for t in candidates]
    best = [t for t, cost in zip(candidates, costs, strict=True) if cost <= min(costs) + 1e-9]
    return best[len(best) // 2]


def _share(values: Sequence[float], wrong: Callable[[float], bool]) -> float:
    return sum(map(wrong, values)) / max(len(values), 1)


def _strongest(answer: Answer, label: str) -> float:
    return max((box.confidence for box in answer.detections if box.label == label), default=0.0)
