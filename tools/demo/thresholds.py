"""Confidences that divide: which solder defect fails, which answer an operator should see. Chosen on parts held out."""

from collections.abc import Sequence

from experts.catalog import Catalog
from experts.slot import SlotPool
from experts.spec import Answer, ExpertId
from experts.vision.infer import infer
from experts.vision.preprocess import fit
from tools.camera.render import part_types
from tools.demo.samples import Sample
from tools.demo.teach import DETECTORS, SharedDetector

#: Share of good parts that one label may call bad by mistake, where the bad parts can be told from them.
_FALSE_CALLS = 0.004
_LOWEST, _HIGHEST = 0.3, 0.75
#: Share of good parts that may become a review because their classifier is unsure, and where the limit may lie.
_REVIEWS, _LEAST_REVIEW, _MOST_REVIEW = 0.01, 0.6, 0.95
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
    mine = [s for s in held_out if detector.covers(library[s.component]) and s.marks]
    answers = _answers(catalog, ExpertId(detector.expert), mine)
    chosen: dict[str, float] = {}
    for label in detector.labels:
        good = sorted(
            (_strongest(a, label) for s, a in zip(mine, answers, strict=True) if s.truth == "ok"), reverse=True
        )
        bad = sorted(_strongest(a, label) for s, a in zip(mine, answers, strict=True) if s.truth == label)
        chosen[label] = choose(good, bad)
    return chosen


def choose(good: Sequence[float], bad: Sequence[float]) -> float:
    """Between the strongest mistakes on good parts (descending) and the weakest hits on bad ones (ascending).

    Halfway where the two are apart; just above the mistakes where they are not.
    """
    tolerated = int(len(good) * _FALSE_CALLS)
    ceiling = good[tolerated] if len(good) > tolerated else 0.0
    floor = bad[int(len(bad) * 0.01)] if bad else 1.0
    middle = ceiling + 0.5 * (floor - ceiling) if floor > ceiling else ceiling + 0.02
    return round(min(max(middle, _LOWEST), _HIGHEST), 2)


def _strongest(answer: Answer, label: str) -> float:
    return max((box.confidence for box in answer.detections if box.label == label), default=0.0)
