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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from coserve_client import CameraImage
from daemon.errors import ConfigError
from routing_rules.load import read_yaml, validate
from tools.names import file_name

_SUFFIX_OF = {b"\xff\xd8": ".jpg", b"BM": ".bmp", b"II*": ".tif", b"MM": ".tif"}
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff"}
PART_FILE = "BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png (or .jpg, .bmp, .tif)"
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


class PictureError(ValueError):
    """No images can be made of a picture; the text says what was expected."""


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
    """Return the parts of `picture`, (height, width[, 3]) BGR, in the layout's order; PictureError for a wrong size."""
    height, width = picture.shape[:2]
    if (width, height) != layout.size:
        raise PictureError(
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
        for number in count():
            try:
                with (folder / f"{name}{f'-{number}' if number else ''}{suffix}").open("xb") as file:
                    file.write(payload)
                break
            except FileExistsError:
                continue
        self.images += 1


@dataclass(frozen=True, slots=True)
class PictureFiles:
    """Makes images of files: whole boards named by the serial, or without a layout one part each."""

    layout: BoardLayout | None = None
    lot: str | None = None

    def find(self, folder: Path) -> tuple[list[Path], list[Path]]:
        """Return the images below `folder` that fit, and those whose path names no part; both sorted."""
        files = sorted(path for path in folder.rglob("*.*") if path.suffix.lower() in SUFFIXES)
        unfit = [path for path in files if self.layout is None and not _names_part(path.relative_to(folder))]
        return [path for path in files if path not in set(unfit)], unfit

    def read(self, folder: Path, files: Iterable[Path]) -> Iterator[CameraImage]:
        """Yield the images of `files` below `folder`; PictureError with the path of a file that gives none."""
        for path in files:
            try:
                yield from self.images(path.relative_to(folder), path.read_bytes())
            except PictureError as error:
                raise PictureError(f"{path}: {error}") from None

    def images(self, path: PurePath, content: bytes, *, is_by_content: bool = False) -> list[CameraImage]:
        """Return the images of one file; `path` is relative to the folder. PictureError if none can be made of it.

        With `is_by_content` ids are the same only for the same bytes at the same place.
        """
        if self.layout is None:
            if not _names_part(path):
                raise PictureError(f"expected {PART_FILE}")
            board_type, serial = path.parts[:2]
            designator, component = path.stem.split(".", 1)
            parts = [PartImage(designator, component, content)]
        else:
            board_type, serial = self.layout.board, path.stem
            picture = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR) if content else None
            if picture is None:
                raise PictureError("it cannot be decoded")
            parts = cut(picture, self.layout)
        board = board_fields(board_type, serial, self.lot)
        ids = [f"{serial}/{designator}" for designator, _, _ in parts]
        if is_by_content:
            digest, own = hashlib.sha256(content).hexdigest()[:16], key(serial)
            ids = [f"{own[:100]}/{digest}/{number}" for number in range(len(parts))]
            if self.layout is None:
                ids = [f"{own}/{key(parts[0].designator)}"[:100] + f"/{digest}"]
        return [
            CameraImage(image_id, png, board, component, {"designator": designator})
            for image_id, (designator, component, png) in zip(ids, parts, strict=True)
        ]


def _names_part(path: PurePath) -> bool:
    return len(path.parts) == 3 and "." in path.stem
