"""Measures the demo's experts on boards that no training saw: by part and by board, with 95 % intervals."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon.line.line import load_line
from experts.spec import Answer, resident_in
from experts.vision.slot import SlotPool
from tools.camera.render import board_types, render_board
from tools.camera.render.images import DEFECT_RATE
from tools.demo.judge import OnAnswer, PartToJudge, judge_parts
from tools.terminal.console import console, print_table
from tools.training.held_out import Rate

#: Shares of parts with a defect, boards of each share, and the first seed. Trainings and cameras use other seeds.
RATES = (DEFECT_RATE, 0.2)
BOARDS, FIRST_SEED = 200, 600_000
_AT_ONCE = 20

OnShare = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class JudgedPart:
    board: int
    component: str
    truth: str
    verdict: str

    @property
    def is_good(self) -> bool:
        return self.truth == "ok"

    @property
    def is_called(self) -> bool:
        return self.verdict != "pass"


@dataclass(frozen=True, slots=True)
class Figures:
    """Verdicts on boards of one rate of defects."""

    rate: float
    parts: tuple[JudgedPart, ...]

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return, by name, how many and out of how many."""
        bad = [part for part in self.parts if not part.is_good]
        good = [part for part in self.parts if part.is_good]
        with_defects = {part.board for part in bad}
        stopped = {part.board for part in self.parts if part.is_called}
        boards = {part.board for part in self.parts}
        without = boards - with_defects
        return {
            "defects caught": (sum(part.is_called for part in bad), len(bad)),
            "good parts called": (sum(part.is_called for part in good), len(good)),
            "boards with defects stopped": (len(with_defects & stopped), len(with_defects)),
            "good boards that pass": (len(without - stopped), len(without)),
        }

    def mistakes(self) -> dict[str, int]:
        """Count mistakes by component, truth and verdict, most frequent first."""
        wrong = Counter(f"{p.component} {p.truth} {p.verdict}" for p in self.parts if p.is_good == p.is_called)
        return dict(wrong.most_common())

    def as_json(self) -> dict[str, Any]:
        counts = {
            name: {"count": count, "of": of, "share": round(count / max(of, 1), 5), "interval": Rate(count, of).wilson}
            for name, (count, of) in self.counts().items()
        }
        return {"rate": self.rate, **counts, "mistakes": self.mistakes()}


def _ignore(_expert: str, _answer: Answer) -> None:
    pass


def measure(
    config: Path, *, boards: int = BOARDS, on_share: OnShare = lambda _: None, on_answer: OnAnswer = _ignore
) -> list[Figures]:
    """Judge boards of each rate as the daemon of `config` would; `on_answer` gets the answers of the first rate."""
    line = load_line(config)
    resident = resident_in(line.catalog)
    pool = SlotPool("cpu", sum(spec.weights_bytes for spec in resident.values()))
    for spec in resident.values():
        pool.load(spec)
    kinds, figures = list(board_types()), list[Figures]()
    for place, rate in enumerate(RATES):
        of_rate = on_answer if place == 0 else _ignore
        judged: list[JudgedPart] = []
        for start in range(0, boards, _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, boards))
            rendered = [
                (number, part)
                for number in numbers
                for part in render_board(kinds[number % len(kinds)], _seed(place, number), rate).placements
            ]
            parts = [PartToJudge(kinds[number % len(kinds)], part.component, part.pixels) for number, part in rendered]
            verdicts = judge_parts(line.routes, line.catalog, pool.slot, parts, on_answer=of_rate)
            judged += [
                JudgedPart(number, part.component, part.truth, verdict)
                for (number, part), verdict in zip(rendered, verdicts, strict=True)
            ]
            on_share((place + numbers.stop / boards) / len(RATES))
        figures.append(Figures(rate, tuple(judged)))
    return figures


def _seed(place: int, number: int) -> int:
    return FIRST_SEED + place * 10_000 + number


def measured_table(figures: Sequence[Figures]) -> None:
    """Print caught defects and false calls, by part and by board, then the mistakes."""
    rows: list[tuple[str, ...]] = []
    for each in figures:
        for name, (count, of) in each.counts().items():
            low, high = Rate(count, of).wilson
            share = f"{count / max(of, 1):.4f}"
            rows.append((f"{each.rate:.0%}", name, f"{count} of {of}", share, f"{low:.4f} to {high:.4f}"))
    print_table("Boards that no training saw", ("defects", "", "", "share", "95 %"), rows)
    for each in figures:
        mistakes = ", ".join(f"{count} {what}" for what, count in each.mistakes().items()) or "none"
        console.print(f"mistakes at {each.rate:.0%}: {mistakes}")
