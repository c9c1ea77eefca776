"""What every side of the live benchmark is asked: component types with their experts, and the order of the images."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import yaml

BOARD_TYPE = "bench"
#: The two labels of every classifier; an image that goes on to a detector has the first.
LABELS = ("ok", "defect")
#: Images of a chained component that go on to its detector.
PASS_RATE = 0.8
#: Placements of one board per component type, about: the list that the board-order trace repeats.
_PLACEMENTS_PER_TYPE = 2

Order = Literal["skewed", "board"]
ORDERS: tuple[Order, ...] = ("skewed", "board")


@dataclass(frozen=True, slots=True)
class Part:
    """A component type: its classifier, the detector behind it, and the share of the images that show it."""

    classifier: str
    detector: str | None
    usage: float


@dataclass(frozen=True, slots=True)
class Ask:
    """One image of the trace. `goes_on`: its classifier passes it, a seeded coin says; `at_s` is its arrival."""

    classifier: str
    detector: str | None
    picture: int
    goes_on: bool
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """The same for every side. Policies know the parts and the pass rate, never which image goes on."""

    order: Order
    parts: tuple[Part, ...]
    asks: tuple[Ask, ...]

    def rules(self) -> str:
        """The routing rules of a line that inspects these parts: quantities are what policies know of usage."""
        classifiers = {part.classifier: self._entry(part) for part in self.parts}
        found = {"fail_on": {LABELS[1]: 0.5}}
        detectors = {part.detector: {"expert": part.detector, **found} for part in self.parts if part.detector}
        quantities = {part.classifier: max(1, round(part.usage * 100_000)) for part in self.parts}
        document = {
            "boards": {BOARD_TYPE: {"components": quantities}},
            "classifiers": classifiers,
            "detectors": detectors,
        }
        return yaml.safe_dump(document, sort_keys=False)

    def visits(self) -> dict[str, int]:
        """How many images each expert sees."""
        seen: dict[str, int] = {}
        for ask in self.asks:
            for expert in (ask.classifier, *((ask.detector,) if ask.detector and ask.goes_on else ())):
                seen[expert] = seen.get(expert, 0) + 1
        return seen

    @staticmethod
    def _entry(part: Part) -> dict[str, object]:
        entry: dict[str, object] = {"expert": part.classifier, "pass": [LABELS[0]], "review_below": 0.0}
        return entry | ({"then": part.detector, "pass_rate": PASS_RATE} if part.detector else {})


def make_parts(classifiers: Sequence[str], detectors: Sequence[str]) -> tuple[Part, ...]:
    """Usage falls as 1 / rank: a tenth of 60 types gets half of the images. Every other type has a detector."""
    weights = [1.0 / rank for rank in range(1, len(classifiers) + 1)]
    return tuple(
        Part(
            name,
            detectors[number // 2 % len(detectors)] if detectors and number % 2 == 0 else None,
            weights[number] / sum(weights),
        )
        for number, name in enumerate(classifiers)
    )


def make_trace(parts: Sequence[Part], order: Order, requests: int, pictures: int, seed: int) -> Trace:
    """`requests` images, all waiting from the start.

    "skewed": component types drawn one by one by usage. "board": one placement list, repeated board after board;
    quantities follow usage, every type is on the board, neighbours are seldom alike.
    """
    dice = random.Random(seed)
    if order == "skewed":
        chosen = dice.choices(parts, [part.usage for part in parts], k=requests)
    else:
        placements = [
            part for part in parts for _ in range(max(1, round(part.usage * _PLACEMENTS_PER_TYPE * len(parts))))
        ]
        dice.shuffle(placements)
        chosen = [placements[number % len(placements)] for number in range(requests)]
    asks = tuple(
        Ask(part.classifier, part.detector, dice.randrange(pictures), dice.random() < PASS_RATE) for part in chosen
    )
    return Trace(order, tuple(parts), asks)
