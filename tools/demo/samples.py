"""Rendered parts to train and calibrate on: panels in looks that no product has, and some units of the products."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.camera.render import (
    RenderedBoard,
    SolderMark,
    board_types,
    part_types,
    render_board,
    render_unit,
    training_panel,
)
from tools.camera.render.board import PixelArray

#: Share of good parts on a panel; the rest is spread evenly over what can go wrong with that part.
_GOOD_SHARE = 0.36
PARTS_PER_PANEL = 48
#: Share of parts with a defect on the products' units, and the first of their seeds: no judged or shown board has them.
_UNIT_DEFECT_RATE, _FIRST_UNIT_SEED = 0.5, 300_000


@dataclass(frozen=True, slots=True)
class Sample:
    """One part: (n, n, 3) uint8 RGB, its truth (`ok` or a defect kind), and its solder marks in crop pixels."""

    component: str
    truth: str
    pixels: PixelArray
    marks: tuple[SolderMark, ...]

    @property
    def placement_label(self) -> str:
        """What the part's classifier should say: solder is not its business."""
        return self.truth if self.truth in part_types()[self.component].labels else "ok"


def render_panels(numbers: Sequence[int]) -> list[Sample]:
    """The parts of the panels with these numbers. A number is a seed: the same panel each time."""
    library = part_types()
    names = list(library)
    found: list[Sample] = []
    for number in numbers:
        rng = np.random.default_rng([911, number])
        components = [names[(number * 7 + index) % len(names)] for index in range(PARTS_PER_PANEL)]
        kinds = ["ok" if rng.random() < _GOOD_SHARE else str(rng.choice(library[name].defects)) for name in components]
        found += _samples(render_unit(training_panel(components, number), kinds, rng))
    return found


def render_units(numbers: Sequence[int]) -> list[Sample]:
    """The parts of units of the four products in turn: traces and vias as they are where the experts will serve."""
    products = sorted(board_types())
    boards = [
        render_board(products[number % len(products)], _FIRST_UNIT_SEED + number, _UNIT_DEFECT_RATE)
        for number in numbers
    ]
    return [sample for board in boards for sample in _samples(board)]


def _samples(board: RenderedBoard) -> list[Sample]:
    return [Sample(p.component, p.truth, p.crop(), p.marks) for p in board.placements]
