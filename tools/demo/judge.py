"""Judges parts with a line's rules and experts, as its daemon judges them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from experts.catalog import Catalog
from experts.spec import Answer, ExpertId, ExpertSpec, resident_in
from experts.vision.infer import infer
from experts.vision.preprocess import Image, fit
from experts.vision.slot import SlotPool
from routing_rules.routes import Judgement, Routes, judge

_BATCH = 16
OnAnswer = Callable[[str, Answer], None]


class PartToJudge(NamedTuple):
    """An image to judge: (h, w, 3) uint8 RGB."""

    board_type: str
    component: str
    pixels: Image


def loaded_pool(catalog: Catalog) -> SlotPool:
    """Return a pool on the CPU that holds every network of the catalog."""
    resident = resident_in(catalog).values()
    pool = SlotPool("cpu", sum(spec.weights_bytes for spec in resident))
    for spec in resident:
        pool.load(spec)
    return pool


def answers_of(pool: SlotPool, spec: ExpertSpec, pixels: Sequence[Image]) -> list[Answer]:
    answers: list[Answer] = []
    for start in range(0, len(pixels), _BATCH):
        batch = [fit(image, spec.task, spec.input_size) for image in pixels[start : start + _BATCH]]
        answers += infer(pool.slot(spec.resident.expert), batch, spec)
    return answers


def judge_parts(
    routes: Routes,
    catalog: Catalog,
    pool: SlotPool,
    parts: Sequence[PartToJudge],
    on_answer: OnAnswer | None = None,
) -> list[str]:
    """Return the verdict of each part, in order. Parts that await the same expert are batched together."""
    verdicts = [""] * len(parts)
    so_far: dict[int, Judgement | None] = dict.fromkeys(range(len(parts)))
    waiting = {number: routes.first_step(part.board_type, part.component) for number, part in enumerate(parts)}
    while waiting:
        first = next(step for step in waiting.values() if step is not None)
        numbers = [number for number, step in waiting.items() if step is not None and step.expert == first.expert]
        spec = catalog[ExpertId(first.expert)]
        answers = answers_of(pool, spec, [parts[number].pixels for number in numbers])
        for number, answer in zip(numbers, answers, strict=True):
            step = waiting.pop(number)
            assert step is not None
            if on_answer is not None:
                on_answer(step.expert, answer)
            height, width = parts[number].pixels.shape[:2]
            judgement = judge(step, answer.label, answer.confidence, answer.detections, so_far[number], (width, height))
            so_far[number] = judgement
            if judgement.next is None:
                verdicts[number] = judgement.verdict
            else:
                waiting[number] = judgement.next
    return verdicts
