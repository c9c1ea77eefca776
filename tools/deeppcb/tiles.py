"""The DeepPCB data set as it lies on disk: pairs of a template and a tested tile, with the defects' boxes.

DeepPCB is by S. Tang and others (MIT licence). It is read from where the user has it; nothing of it is kept here. A
folder of that form is `train.txt` and `val.txt` with a pair's name per line (`group00041/00041000`), and for each pair
`NAME_temp.jpg`, `NAME_test.jpg` and `NAME.txt` with lines `x1 y1 x2 y2 type`, the type from 1 to 6.
"""

import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experts.errors import ImageError
from experts.vision.decode import decode

Tile = NDArray[np.uint8]
#: (n, 5) float32: x1 y1 x2 y2 class, in pixels of the tile.
Boxes = NDArray[np.float32]


class Defect(IntEnum):
    """The six kinds, as classes of a network (the files count from 1)."""

    OPEN = 0
    SHORT = 1
    MOUSEBITE = 2
    SPUR = 3
    COPPER = 4
    PIN_HOLE = 5


#: Labels in the order of the classes.
LABELS = ("open", "short", "mousebite", "spur", "copper", "pin-hole")
#: Pixels darker than this are copper; the tiles are black and white but for JPEG's noise.
COPPER_BELOW = 128


class DataError(Exception):
    """The data set cannot be read; the text names file and line, and what was expected."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A board tile without defects and one with; both (H, W) uint8, grey."""

    name: str
    pattern: str
    template: Tile
    test: Tile
    boxes: Boxes
    template_file: Path
    test_file: Path


def read_split(data: Path, split: str) -> list[Pair]:
    """All pairs that `data/SPLIT.txt` names, in its order."""
    listing = data / f"{split}.txt"
    try:
        lines = listing.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{listing}: cannot be read ({error.strerror}); name the folder that holds it") from error
    names = [(number, line.split()[0]) for number, line in enumerate(lines, 1) if line.strip()]
    if not names:
        raise DataError(f"{listing}: names no pair; expected lines such as group00041/00041000")
    return [_read_pair(data, name, f"{listing}:{number}") for number, name in names]


def patterns_of(pairs: list[Pair]) -> list[str]:
    """The board patterns, sorted."""
    return sorted({pair.pattern for pair in pairs})


def is_copper(tile: Tile) -> NDArray[np.bool_]:
    return tile < COPPER_BELOW


def _read_pair(data: Path, name: str, where: str) -> Pair:
    pattern = name.split("/", maxsplit=1)[0]
    if pattern == name or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", pattern):
        expected = "expected PATTERN/NAME, the pattern being a folder named in letters, digits and . _ -"
        raise DataError(f"{where}: {expected}, not {name!r}")
    template_file, test_file = data / f"{name}_temp.jpg", data / f"{name}_test.jpg"
    template, test = _read_tile(template_file, where), _read_tile(test_file, where)
    if template.shape != test.shape:
        raise DataError(f"{test_file}: is {test.shape[::-1]}, its template {template.shape[::-1]}")
    boxes = _read_boxes(data / f"{name}.txt", where)
    return Pair(name, pattern, template, test, boxes, template_file, test_file)


def _read_tile(file: Path, where: str) -> Tile:
    try:
        return np.ascontiguousarray(decode(file.read_bytes(), "image")[:, :, 1])
    except OSError as error:
        raise DataError(f"{where}: {file} cannot be read ({error.strerror})") from error
    except ImageError as error:
        raise DataError(f"{where}: {file}: {error}") from error


def _read_boxes(file: Path, where: str) -> Boxes:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{where}: {file} cannot be read ({error.strerror})") from error
    boxes: list[tuple[float, ...]] = []
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        try:
            x1, y1, x2, y2, kind = (int(word) for word in words)
        except ValueError as error:
            raise DataError(f"{file}:{number}: expected `x1 y1 x2 y2 type`, not {line!r}") from error
        if not (1 <= kind <= len(LABELS) and x1 < x2 and y1 < y2):
            raise DataError(f"{file}:{number}: expected x1 < x2, y1 < y2 and a type from 1 to 6, not {line!r}")
        boxes.append((x1, y1, x2, y2, kind - 1))
    return np.array(boxes, np.float32).reshape(-1, 5)
