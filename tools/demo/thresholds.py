"""From which confidence on a solder defect is a failure: chosen on parts held out from training."""

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
_LOWEST, _HIGHEST = 0.28, 0.75
_BATCH = 16


def choose_all(catalog: Catalog, held_out: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Confidence by label and detector; `joint` is what should be there, so it fails nothing."""
    return {detector.expert: _choose(catalog, detector, held_out) for detector in DETECTORS}


def _choose(catalog: Catalog, detector: SharedDetector, held_out: Sequence[Sample]) -> dict[str, float]:
    library = part_types()
    mine = [s for s in held_out if detector.covers(library[s.component]) and s.marks]
    spec = catalog[ExpertId(detector.expert)]
    pool = SlotPool("cpu", spec.weights_bytes)
    pool.load(spec)
    slot = pool.slot(spec.expert)
    answers: list[Answer] = []
    for start in range(0, len(mine), _BATCH):
        answers += infer(slot, [fit(s.pixels, "detect", spec.input_size) for s in mine[start : start + _BATCH]])
    chosen: dict[str, float] = {}
    for label in detector.labels:
        if label == "joint":
            continue
        good = sorted(
            (_strongest(a, label) for s, a in zip(mine, answers, strict=True) if s.truth == "ok"), reverse=True
        )
        bad = sorted(_strongest(a, label) for s, a in zip(mine, answers, strict=True) if s.truth == label)
        chosen[label] = choose(good, bad)
    return chosen


def choose(good: Sequence[float], bad: Sequence[float]) -> float:
    """Between the strongest mistakes on good parts (descending) and the weakest hits on bad ones (ascending).

    Where the two are apart, nearer to the good parts: an escape costs more than a second look.
    """
    tolerated = int(len(good) * _FALSE_CALLS)
    ceiling = good[tolerated] if len(good) > tolerated else 0.0
    floor = bad[int(len(bad) * 0.01)] if bad else 1.0
    middle = ceiling + 0.3 * (floor - ceiling) if floor > ceiling else ceiling + 0.02
    return round(min(max(middle, _LOWEST), _HIGHEST), 2)


def _strongest(answer: Answer, label: str) -> float:
    return max((box.confidence for box in answer.detections if box.label == label), default=0.0)
