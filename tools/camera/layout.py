"""The parts that a picture shows: cut out by a layout, or one for each file, named by its path.

```yaml
board: sensor-node
size: [880, 680]                # pixels of the picture, width and height
parts:
  R1: {component: R0603, box: [120, 80, 168, 128], turn: 90}
```
A box is left, top, right, bottom in pixels, right and bottom not included. `turn`: degrees clockwise by which the part
is turned before it is sent, so that all parts of one type lie alike.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple
from unicodedata import normalize

import cv2
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from coserve_client import CameraImage
from daemon.errors import ConfigError
from experts.errors import ImageError
from experts.vision.preprocess import MAX_PIXELS, decode
from experts.vision.structure import check_structure
from routing_rules.load import read_yaml, validate
from tools.pictures import MARK_IGNORED, as_payload, find_pictures, orientation
from tools.terminal.console import CommandError
from tools.terminal.names import file_name, legal_name

_SUFFIX_OF = {b"\xff\xd8": ".jpg", b"BM": ".bmp", b"II*": ".tif", b"MM": ".tif"}
#: No images can be made of a picture; the text says what was expected.
NO_IMAGE = (ImageError, CommandError)
PART_FILE = "BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png (or .jpg, .bmp, .tif, .webp)"
_ILLEGAL_IN_KEY = re.compile(r"[^A-Za-z0-9._:-]+")


class LayoutPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    component: str = Field(min_length=1, max_length=128)
    box: tuple[int, int, int, int]
    turn: Literal[0, 90, 180, 270] = 0


class BoardLayout(BaseModel):
    """One board type as the camera sees it. `parts` by designator."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    board: str = Field(min_length=1, max_length=128)
    size: tuple[int, int]
    parts: dict[str, LayoutPart] = Field(min_length=1)


class PartImage(NamedTuple):
    designator: str
    component: str
    png: bytes


def load_layout(path: Path) -> BoardLayout:
    """ConfigError has every mistake, each with its line."""
    document = read_yaml(path)
    layout, problems = validate(BoardLayout, document)
    if layout is not None:
        width, height = layout.size
        if width < 1 or height < 1:
            problems.append(document.problem(("size",), f"expected [width, height] in pixels, not {[width, height]}"))
        for designator, part in layout.parts.items():
            x1, y1, x2, y2 = part.box
            if not (0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height):
                message = (
                    f"the box {list(part.box)} is not within the picture: expected [left, top, right, bottom] with "
                    f"0 ≤ left < right ≤ {width} and 0 ≤ top < bottom ≤ {height}"
                )
                problems.append(document.problem(("parts", designator, "box"), message))
            if not designator.strip() or len(designator) > 128:
                problems.append(document.problem(("parts", designator), "expected a designator such as R12", key=True))
    if layout is None or problems:
        raise ConfigError(problems)
    return layout


def cut(picture: NDArray[Any], layout: BoardLayout) -> list[PartImage]:
    """Return the parts of `picture`, (height, width[, 3]) BGR, in the layout's order; ImageError for a wrong size."""
    height, width = picture.shape[:2]
    if (width, height) != layout.size:
        raise ImageError(
            f"the picture has {width} × {height} pixels, the layout of {layout.board} is for "
            f"{layout.size[0]} × {layout.size[1]}: set the camera to that, or measure the boxes again"
        )
    return [PartImage(designator, part.component, _png(picture, part)) for designator, part in layout.parts.items()]


def _png(picture: NDArray[Any], part: LayoutPart) -> bytes:
    x1, y1, x2, y2 = part.box
    done, png = cv2.imencode(".png", np.ascontiguousarray(np.rot90(picture[y1:y2, x1:x2], -part.turn // 90)))
    assert done, "PNG takes every box of 8-bit pixels"
    return png.tobytes()


def board_fields(board_type: str, serial: str, lot: str | None) -> dict[str, Any]:
    return {"type": board_type, "serial": serial} | ({"lot": lot} if lot else {})


def key(text: str) -> str:
    """Make `text` a part of an id: a dash for each run of characters that an id may not have."""
    return _ILLEGAL_IN_KEY.sub("-", text) or "-"


class TrainingFolder:
    """Takes a publisher's place: writes FOLDER/COMPONENT/SERIAL.DESIGNATOR.png for a person to sort by label."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images = 0

    def publish(
        self, image_id: str, payload: bytes, *, board: Mapping[str, Any], component: str, **fields: Any
    ) -> None:
        """Write one image; a name that is taken gets a number. Raises OSError."""
        del image_id
        name = f"{file_name(board['serial'])}.{file_name(str(fields.get('designator') or component))}"
        suffix = next((end for start, end in _SUFFIX_OF.items() if payload.startswith(start)), ".png")
        folder = self.folder / file_name(component)
        folder.mkdir(parents=True, exist_ok=True)
        free_place(folder / f"{name}{suffix}").write_bytes(payload)
        self.images += 1


def free_place(path: Path) -> Path:
    """Return `path` itself, or if it is taken NAME-2, NAME-3, …"""
    others = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
    return next(place for place in chain([path], others) if not place.exists())


@dataclass(slots=True)
class PictureFiles:
    """Makes images of files: whole boards named by the serial, or without a layout one part each.

    `not_sent` counts the files that gave no image, each of which `say` named, and `left_out` others by reason.
    """

    layout: BoardLayout | None = None
    lot: str | None = None
    upright: bool = False
    say: Callable[[str], None] = print
    not_sent: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])
    _has_said_mark: bool = False

    def find(self, folder: Path) -> list[Path]:
        """Return the pictures below `folder` that name a part or a board; say which name none, or one that is taken."""
        found = find_pictures(folder)
        self.left_out = found.left_out
        named = defaultdict[tuple[str, ...], list[Path]](list)
        unnamed: list[Path] = []
        for path in found.files:
            part = self.part_of(path.relative_to(folder))
            (unnamed if part is None else named[part[:3]]).append(path)
        if unnamed:
            self.left_out[f"not named {PART_FILE}, the first is {unnamed[0]}"] = len(unnamed)
        for part, files in named.items():
            if len(files) > 1:
                what = " ".join(part) if self.layout is None else f"board {part[0]}"
                self.refuse(", ".join(map(str, files)), f"more than one picture of {what}: leave one", len(files))
        return [files[0] for files in named.values() if len(files) == 1]

    def read(self, folder: Path, files: Iterable[Path]) -> Iterator[CameraImage]:
        """Yield the images of `files` below `folder`, and name each file that gives none."""
        for path in files:
            try:
                yield from self.images(path.relative_to(folder), path.read_bytes())
            except NO_IMAGE as error:
                self.refuse(path, str(error))
            except OSError as error:
                self.refuse(path, f"cannot be read: {error.strerror}")

    def refuse(self, path: object, why: str, files: int = 1) -> None:
        self.not_sent += files
        self.say(f"not sent: {path}: {why}")

    def images(self, path: PurePath, content: bytes) -> list[CameraImage]:
        """Return the images of one file; `path` is relative to the folder. Raises NO_IMAGE.

        Ids are the same only for the same bytes at the same place.
        """
        part = self.part_of(path)
        if part is None:
            raise ImageError(f"expected {PART_FILE}")
        part = tuple(legal_name(name, "its name") for name in part)
        if not (self.upright or self._has_said_mark) and orientation(content) != 1:
            self._has_said_mark = True
            self.say(f"{path} has an orientation mark: {MARK_IGNORED}")
        content = as_payload(content, upright=self.upright)
        if self.layout is None:
            check_structure(content, MAX_PIXELS)
            board_type, serial, designator, component = part
            parts = [PartImage(designator, component, content)]
        else:
            board_type, serial = self.layout.board, part[0]
            parts = cut(decode(content, "image")[:, :, ::-1], self.layout)
        board, place = board_fields(board_type, serial, self.lot), (board_type, serial)
        return [
            CameraImage(_image_id(*place, name, payload), payload, board, component, {"designator": name})
            for name, component, payload in parts
        ]

    def part_of(self, path: PurePath) -> tuple[str, ...] | None:
        """Return the names in `path`: board type, serial, designator, component; of a whole board the serial."""
        is_named = self.layout is not None or (len(path.parts) == 3 and "." in path.stem)
        names = (path.stem,) if self.layout else (*path.parts[:2], *path.stem.split(".", 1))
        return tuple(normalize("NFC", name).strip() for name in names) if is_named else None


def _image_id(board_type: str, serial: str, designator: str, payload: bytes) -> str:
    digest = hashlib.sha256("\0".join((board_type, serial, designator, "")).encode())
    digest.update(payload)
    return f"{key(serial)[:60]}/{key(designator)[:40]}/{digest.hexdigest()[:16]}"
