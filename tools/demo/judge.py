"""Judges parts with a line's rules and experts, as its daemon judges them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from experts.catalog import Catalog
from experts.spec import Answer, ExpertSpec, resident_in
from experts.vision.preprocess import Image, Prepared, fit
from experts.vision.slot import SlotPool
from routing_rules.routes import Guard, Judgement, Routes, VerdictName, guarded
from tools.query.rejudge import judge_images

OnAnswer = Callable[[str, Answer], None]


class PartToJudge(NamedTuple):
    """An image to judge: (h, w, 3) uint8 RGB."""

    board_type: str
    component: str
    pixels: Image


def loaded_pool(catalog: Catalog) -> SlotPool:
    resident = resident_in(catalog).values()
    pool = SlotPool("cpu", sum(spec.weights_bytes for spec in resident))
    for spec in resident:
        pool.load(spec)
    return pool


def judge_parts(
    routes: Routes,
    catalog: Catalog,
    pool: SlotPool,
    parts: Sequence[PartToJudge],
    on_answer: OnAnswer = lambda *_: None,
) -> list[tuple[VerdictName, Guard | None]]:
    """Return the parts' verdicts, with the guard that turned a pass into a review."""
    guards: list[str | None] = [None] * len(parts)

    def heard(number: int, expert: str, answer: Answer) -> None:
        guards[number] = guarded("pass", answer.guards)[1] or guards[number]
        on_answer(expert, answer)

    firsts = [routes.first_step(part.board_type, part.component) for part in parts]
    read: Callable[[int, ExpertSpec], Prepared] = lambda number, spec: fit(  # noqa: E731
        parts[number].pixels, spec.task, spec.input_size
    )
    ends = judge_images(firsts, read, catalog, lambda spec: pool.slot(spec.expert), on_answer=heard)
    return [
        guarded(end.verdict if isinstance(end, Judgement) else "unknown", [guard or ""])
        for end, guard in zip(ends, guards, strict=True)
    ]
