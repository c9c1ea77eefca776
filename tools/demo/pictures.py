"""Renders the parts that the demo's experts learn from, and keeps them in files that a later run reads again.

Half of a file's parts are on panels in looks that no product has, half on units of the products, with the traces and
vias that the experts will meet. A file's number is its seed.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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

#: Parts of a panel: mostly those of which a board has few.
_PANEL = {
    "QFP32": 6,
    "QFP44": 6,
    "SOIC16": 5,
    "HDR10": 5,
    "SOIC8": 4,
    "SOT23-5": 4,
    "SOT23": 3,
    "CE6": 3,
    "CE8": 3,
    "LED0805": 2,
    "R0603": 2,
}
_PANELS_PER_FILE = 4
#: Share of good parts on a panel; the rest is spread evenly over what can go wrong with that part.
_GOOD_SHARE = 0.4
#: Share of parts with a defect on the products' units, and the first of their seeds: no judged or shown board has them.
_UNIT_DEFECT_RATE, _FIRST_UNIT_SEED = 0.5, 300_000


@dataclass(frozen=True, slots=True)
class Sample:
    """A part: (n, n, 3) uint8 RGB, its truth (`ok` or a defect kind), and its solder marks in crop pixels."""

    component: str
    truth: str
    pixels: PixelArray
    marks: tuple[SolderMark, ...]

    @property
    def placement_label(self) -> str:
        """Return the label that the part's classifier should answer; it does not judge solder."""
        return self.truth if self.truth in part_types()[self.component].labels else "ok"


def render_file(number: int) -> list[Sample]:
    """Return the parts of four panels and of a unit of each product."""
    boards = [_panel(number * _PANELS_PER_FILE + k) for k in range(_PANELS_PER_FILE)]
    boards += [render_board(name, _FIRST_UNIT_SEED + number, _UNIT_DEFECT_RATE) for name in board_types()]
    return [sample for board in boards for sample in samples_of(board)]


def _panel(number: int) -> RenderedBoard:
    library = part_types()
    rng = np.random.default_rng([911, number])
    counts = dict.fromkeys(library, 1) | _PANEL
    components = [name for name, count in counts.items() for _ in range(count)]
    rng.shuffle(components)
    kinds = ["ok" if rng.random() < _GOOD_SHARE else str(rng.choice(library[name].defects)) for name in components]
    return render_unit(training_panel(components, number), kinds, rng)


def samples_of(board: RenderedBoard) -> list[Sample]:
    return [Sample(p.component, p.truth, p.pixels, p.marks) for p in board.placements]


def render_missing(folder: Path, files: int) -> Iterator[int]:
    """Write the files that `folder` does not have, and yield the number of each that is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        path = _path(folder, number)
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}.part")
            with part.open("wb") as stream:
                _save(stream, render_file(number))
            part.replace(path)
        yield number


def read_files(folder: Path, numbers: range) -> list[Sample]:
    paths = [path for number in numbers if (path := _path(folder, number)).exists()]
    return [sample for path in paths for sample in _load(path)]


def _path(folder: Path, number: int) -> Path:
    return folder / f"parts-{number:04d}.npz"


def _save(stream: IO[bytes], samples: list[Sample]) -> None:
    # In single precision, as trainings have always read boxes.
    marks = [[(mark.label, np.array(mark.box, np.float32).tolist()) for mark in sample.marks] for sample in samples]
    rows = [(each.component, each.truth, len(each.pixels), own) for each, own in zip(samples, marks, strict=True)]
    np.savez(stream, rows=json.dumps(rows), pixels=np.concatenate([sample.pixels.ravel() for sample in samples]))


def _load(path: Path) -> Iterator[Sample]:
    with np.load(path) as file:
        rows, pixels = json.loads(str(file["rows"])), file["pixels"]
    begin = 0
    for component, truth, side, marks in rows:
        part = pixels[begin : begin + side * side * 3].reshape(side, side, 3)
        yield Sample(component, truth, part, tuple(SolderMark(label, tuple(box)) for label, box in marks))
        begin += part.size
