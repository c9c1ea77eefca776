"""Chooses the confidences of the demo's rules on parts held out, and judges whole boards as the daemon judges them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from daemon.line.line import load_line
from experts.catalog import Catalog
from experts.spec import Answer, ExpertId, ExpertSpec, resident_in
from experts.vision.infer import infer
from experts.vision.preprocess import Image, fit
from experts.vision.slot import Slot, SlotPool
from routing_rules.routes import Judgement, Routes, judge
from tools.camera.render import board_types, part_types, render_board
from tools.demo.training import DETECTORS, Sample, SharedDetector
from tools.experts.measure import answers_of

_BATCH = 16
#: Limits of the confidence from which a solder defect fails.
_MIN_FAIL, _MAX_FAIL = 0.4, 0.6
#: Share of good parts that may become a review because their classifier is unsure, and the limits of that confidence.
_REVIEWS, _MIN_REVIEW, _MAX_REVIEW = 0.01, 0.6, 0.88

OnAnswer = Callable[[str, Answer], None]


class PartToJudge(NamedTuple):
    """An image to judge: (h, w, 3) uint8 RGB."""

    board_type: str
    component: str
    pixels: Image


@dataclass(frozen=True, slots=True)
class Quality:
    """Defective parts called fail or review, and good parts called anything but pass; `missed` counts by defect."""

    boards: int
    defects: int
    caught: int
    good: int
    false_calls: int
    missed: dict[str, int]

    @property
    def catch_rate(self) -> float:
        return self.caught / max(self.defects, 1)

    @property
    def false_call_rate(self) -> float:
        return self.false_calls / max(self.good, 1)


def fail_thresholds(catalog: Catalog, held_out: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Return the confidence from which a box is a failure, by detector and label."""
    return {detector.expert: _thresholds(catalog, detector, held_out) for detector in DETECTORS}


def _thresholds(catalog: Catalog, detector: SharedDetector, held_out: Sequence[Sample]) -> dict[str, float]:
    library = part_types()
    mine = [sample for sample in held_out if detector.covers(library[sample.component]) and sample.marks]
    # Turned to all four sides: few samples are held out, and solder looks the same from each side.
    turned = [replace(sample, pixels=np.rot90(sample.pixels, turns).copy()) for sample in mine for turns in range(4)]
    answers = _answers(catalog, detector.expert, turned)
    thresholds: dict[str, float] = {}
    for label in detector.labels:
        good = [_surest(a, label) for s, a in zip(turned, answers, strict=True) if s.truth == "ok"]
        bad = [_surest(a, label) for s, a in zip(turned, answers, strict=True) if s.truth == label]
        thresholds[label] = choose_threshold(good, bad)
    return thresholds


def choose_threshold(good: Sequence[float], bad: Sequence[float]) -> float:
    """Return the confidence that divides the surest boxes on good parts from those on bad ones.

    A false call weighs as much as two escapes, in shares of all good and all bad parts; among equal confidences the
    middle one, as far from both as can be.
    """
    candidates = [step / 100 for step in range(round(_MIN_FAIL * 100), round(_MAX_FAIL * 100) + 1)]
    escapes = [sum(confidence < candidate for confidence in bad) / max(len(bad), 1) for candidate in candidates]
    calls = [sum(confidence >= candidate for confidence in good) / max(len(good), 1) for candidate in candidates]
    costs = [escape + 2 * call for escape, call in zip(escapes, calls, strict=True)]
    best = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost <= min(costs) + 1e-9]
    return best[len(best) // 2]


def review_below(catalog: Catalog, held_out: Sequence[Sample]) -> float:
    """Return the confidence that all but a few good parts reach at their classifiers."""
    confidences: list[float] = []
    for name, part in part_types().items():
        good = [sample for sample in held_out if sample.component == name and sample.truth == "ok"]
        confidences += [a.confidence or 0.0 for a in _answers(catalog, name, good) if a.label == part.labels[0]]
    if not confidences:
        return _MAX_REVIEW
    confidence = sorted(confidences)[int(len(confidences) * _REVIEWS)]
    return round(min(max(confidence, _MIN_REVIEW), _MAX_REVIEW), 2)


def _answers(catalog: Catalog, expert: str, parts: Sequence[Sample]) -> list[Answer]:
    spec = catalog[ExpertId(expert)]
    return answers_of(spec, (fit(part.pixels, spec.task, spec.input_size) for part in parts))


def _surest(answer: Answer, label: str) -> float:
    return max((box.confidence for box in answer.detections if box.label == label), default=0.0)


def judge_line(
    config: Path,
    seeds: Sequence[int],
    defect_rate: float,
    on_share: Callable[[float], None],
    on_answer: OnAnswer = lambda _expert, _answer: None,
) -> Quality:
    """Render a board of every type for each seed, and judge its parts with the line of `config`.

    `on_answer` gets each expert's name and answer.
    """
    line = load_line(config)
    resident = resident_in(line.catalog)
    pool = SlotPool("cpu", sum(spec.weights_bytes for spec in resident.values()))
    for spec in resident.values():
        pool.load(spec)
    parts: list[PartToJudge] = []
    truths: list[str] = []
    boards = [(kind, seed) for seed in seeds for kind in board_types()]
    for number, (kind, seed) in enumerate(boards, 1):
        for placement in render_board(kind, seed, defect_rate).placements:
            parts.append(PartToJudge(kind, placement.component, placement.pixels))
            truths.append(placement.truth)
        on_share(0.5 * number / len(boards))
    verdicts = judge_parts(
        line.routes, line.catalog, pool.slot, parts, lambda share: on_share(0.5 + 0.5 * share), on_answer
    )
    missed = Counter(t for t, verdict in zip(truths, verdicts, strict=True) if t != "ok" and verdict == "pass")
    defects = sum(truth != "ok" for truth in truths)
    return Quality(
        boards=len(boards),
        defects=defects,
        caught=defects - missed.total(),
        good=len(truths) - defects,
        false_calls=sum(t == "ok" and verdict != "pass" for t, verdict in zip(truths, verdicts, strict=True)),
        missed=dict(sorted(missed.items())),
    )


def judge_parts(
    routes: Routes,
    catalog: Mapping[ExpertId, ExpertSpec],
    slot: Callable[[ExpertId], Slot],
    parts: Sequence[PartToJudge],
    on_share: Callable[[float], None] = lambda _share: None,
    on_answer: OnAnswer = lambda _expert, _answer: None,
) -> list[str]:
    """Return the verdict of each part, in order; parts of one expert share batches."""
    verdicts = [""] * len(parts)
    so_far: dict[int, Judgement | None] = dict.fromkeys(range(len(parts)))
    waiting = {number: routes.first_step(part.board_type, part.component) for number, part in enumerate(parts)}
    while waiting:
        first = next(step for step in waiting.values() if step is not None)
        numbers = [number for number, step in waiting.items() if step is not None and step.expert == first.expert]
        spec = catalog[ExpertId(first.expert)]
        answers = _slot_answers(slot(spec.resident.expert), spec, [parts[number].pixels for number in numbers])
        for number, answer in zip(numbers, answers, strict=True):
            step = waiting.pop(number)
            assert step is not None
            on_answer(step.expert, answer)
            height, width = parts[number].pixels.shape[:2]
            judgement = judge(step, answer.label, answer.confidence, answer.detections, so_far[number], (width, height))
            so_far[number] = judgement
            if judgement.next is None:
                verdicts[number] = judgement.verdict
            else:
                waiting[number] = judgement.next
        on_share(1 - len(waiting) / len(parts))
    return verdicts


def _slot_answers(slot: Slot, spec: ExpertSpec, pixels: Sequence[Image]) -> list[Answer]:
    answers: list[Answer] = []
    for start in range(0, len(pixels), _BATCH):
        batch = [fit(image, spec.task, spec.input_size) for image in pixels[start : start + _BATCH]]
        answers += infer(slot, batch, spec)
    return answers
