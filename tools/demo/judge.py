"""Judges parts with a line's rules and experts, as its daemon judges them."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from experts.spec import Answer, ExpertId, ExpertSpec
from experts.vision.infer import infer
from experts.vision.preprocess import Image, fit
from experts.vision.slot import Slot
from routing_rules.routes import Judgement, Routes, judge

_BATCH = 16
OnAnswer = Callable[[str, Answer], None]


class PartToJudge(NamedTuple):
    """An image to judge: (h, w, 3) uint8 RGB."""

    board_type: str
    component: str
    pixels: Image


def judge_parts(
    routes: Routes,
    catalog: Mapping[ExpertId, ExpertSpec],
    slot: Callable[[ExpertId], Slot],
    parts: Sequence[PartToJudge],
    on_share: Callable[[float], None] = lambda _share: None,
    on_answer: OnAnswer = lambda _expert, _answer: None,
) -> list[str]:
    """Return the verdict of each part, in order. Parts that await the same expert are batched together."""
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
