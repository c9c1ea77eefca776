"""Where the parts lie in a picture of a whole board: a small YAML file, and cutting them out as it says.

```yaml
board: sensor-node
size: [880, 680]                # pixels of the picture, width and height
parts:
  R1: {component: R0603, box: [120, 80, 168, 128], turn: 90}
```
A box is left, top, right, bottom in pixels, right and bottom not included. `turn` is by how many degrees clockwise the
part is turned before it is sent, so that all of one type lie alike.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from daemon.errors import ConfigError
from routing_rules.load import read_yaml, validate

Pixels = NDArray[Any]


class Part(BaseModel):
    """One component on the board."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    component: str = Field(min_length=1, max_length=128)
    box: tuple[int, int, int, int]
    turn: Literal[0, 90, 180, 270] = 0


class Layout(BaseModel):
    """One board type as the camera sees it. `parts` by designator."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    board: str = Field(min_length=1, max_length=128)
    size: tuple[int, int]
    parts: dict[str, Part] = Field(min_length=1)


class WrongSizeError(Exception):
    """A picture that the layout was not made for."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One part of one picture, as a PNG."""

    designator: str
    component: str
    png: bytes


def load_layout(path: Path) -> Layout:
    """The checked file; ConfigError with every mistake, each with its line."""
    document = read_yaml(path)
    layout, problems = validate(Layout, document)
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


def cut(picture: Pixels, layout: Layout) -> list[Cut]:
    """The parts of `picture`, (height, width) or (height, width, 3) BGR, in the layout's order; WrongSizeError."""
    height, width = picture.shape[:2]
    if (width, height) != layout.size:
        raise WrongSizeError(
            f"the picture has {width} × {height} pixels, the layout of {layout.board} is for "
            f"{layout.size[0]} × {layout.size[1]}: set the camera to that, or measure the boxes anew"
        )
    return [Cut(designator, part.component, _png(picture, part)) for designator, part in layout.parts.items()]


def _png(picture: Pixels, part: Part) -> bytes:
    x1, y1, x2, y2 = part.box
    done, png = cv2.imencode(".png", np.ascontiguousarray(np.rot90(picture[y1:y2, x1:x2], -part.turn // 90)))
    assert done, "PNG takes every box of 8-bit pixels"
    return png.tobytes()
