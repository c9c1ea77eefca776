"""How good the demo's experts are on whole boards that nothing was trained on, judged as the daemon judges."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.line.line import load_line
from experts.slot import Slot, SlotPool
from experts.spec import Answer, ExpertId
from experts.vision.infer import infer
from experts.vision.preprocess import fit
from routing_rules.routes import Judgement, Routes, judge
from tools.camera.render import PartPlacement, board_types, render_board

_BATCH = 16

OnAnswer = Callable[[str, Answer], None]


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


def judge_line(
    config: Path,
    seeds: Sequence[int],
    defect_rate: float,
    on_share: Callable[[float], None],
    on_answer: OnAnswer = lambda _expert, _answer: None,
) -> Quality:
    """Render a board of every type for each seed and judge its parts with the line of `config`.

    `on_answer` hears what each expert of the chains answers, and which.
    """
    line = load_line(config)
    pool = SlotPool("cpu", sum(spec.weights_bytes for spec in line.catalog.values()))
    for spec in line.catalog.values():
        pool.load(spec)
    parts: list[tuple[str, PartPlacement]] = []
    boards = [(kind, seed) for seed in seeds for kind in board_types()]
    for number, (kind, seed) in enumerate(boards):
        parts += [(kind, placement) for placement in render_board(kind, seed, defect_rate).placements]
        on_share(0.5 * (number + 1) / len(boards))
    verdicts = judge_parts(line.routes, pool.slot, parts, lambda share: on_share(0.5 + 0.5 * share), on_answer)
    truths = [placement.truth for _, placement in parts]
    missed = Counter(t for t, v in zip(truths, verdicts, strict=True) if t != "ok" and v == "pass")
    defects = sum(truth != "ok" for truth in truths)
    return Quality(
        boards=len(boards),
        defects=defects,
        caught=defects - missed.total(),
        good=len(truths) - defects,
        false_calls=sum(t == "ok" and v != "pass" for t, v in zip(truths, verdicts, strict=True)),
        missed=dict(sorted(missed.items())),
    )


def judge_parts(
    routes: Routes,
    slot: Callable[[ExpertId], Slot],
    parts: Sequence[tuple[str, PartPlacement]],
    on_share: Callable[[float], None],
    on_answer: OnAnswer = lambda _expert, _answer: None,
) -> list[str]:
    """The verdict of each (board type, part), in order; parts of one expert share batches."""
    verdicts = [""] * len(parts)
    so_far: dict[int, Judgement | None] = dict.fromkeys(range(len(parts)))
    waiting = {number: routes.first_step(kind, placement.component) for number, (kind, placement) in enumerate(parts)}
    while waiting:
        first = next(step for step in waiting.values() if step is not None)
        chosen = [number for number, step in waiting.items() if step is not None and step.expert == first.expert]
        answers = _answers(slot(ExpertId(first.expert)), [parts[number][1] for number in chosen])
        for number, answer in zip(chosen, answers, strict=True):
            step = waiting.pop(number)
            assert step is not None
            on_answer(step.expert, answer)
            side = parts[number][1].pixels.shape[0]
            judgement = judge(step, answer.label, answer.confidence, answer.detections, so_far[number], (side, side))
            so_far[number] = judgement
            if judgement.next is None:
                verdicts[number] = judgement.verdict
            else:
                waiting[number] = judgement.next
        on_share(1 - len(waiting) / len(parts))
    return verdicts


def _answers(slot: Slot, parts: Sequence[PartPlacement]) -> list[Answer]:
    found: list[Answer] = []
    for start in range(0, len(parts), _BATCH):
        prepared = [fit(part.pixels, slot.spec.task, slot.spec.input_size) for part in parts[start : start + _BATCH]]
        found += infer(slot, prepared)
    return found
