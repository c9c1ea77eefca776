"""A populated board as a camera sees it, with the truth about every part."""

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from tools.camera.render.bodies import draw_body
from tools.camera.render.condition import Condition, make_condition
from tools.camera.render.layouts import BoardType, PartPlace, board_types
from tools.camera.render.parts import PartType, part_types
from tools.camera.render.solder import (
    BoardScene,
    Box,
    SolderMark,
    bridge_boxes,
    draw_bridges,
    draw_flux,
    draw_ground,
    marks_of,
)
from tools.camera.render.substrate import bare_board
from tools.camera.render.surface import Floats, Layer, Light, channels

PixelArray = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PartPlacement:
    """One part on one board. `box` is the crop on the board; `marks` are boxes in crop pixels.

    `pixels`: (n, n, 3) uint8 RGB, turned so that the part lies as in the library. `truth` is `ok` or the defect kind.
    `marks` is empty if the body is misplaced: its solder is then not judged.
    """

    designator: str
    component: str
    truth: str
    box: tuple[int, int, int, int]
    quarter_turns: int
    marks: tuple[SolderMark, ...]
    pixels: PixelArray

    def on_board(self, box: Box) -> Box:
        side = self.box[2] - self.box[0]
        x1, y1, x2, y2 = box
        for _ in range(self.quarter_turns % 4):
            x1, y1, x2, y2 = y1, side - x2, y2, side - x1
        return (x1 + self.box[0], y1 + self.box[1], x2 + self.box[0], y2 + self.box[1])


@dataclass(frozen=True, slots=True)
class RenderedBoard:
    """One unit of a board type: (height, width, 3) uint8 RGB and its placements."""

    board_type: str
    image: PixelArray
    placements: tuple[PartPlacement, ...]


def render_board(board_type: str, seed: int, defect_rate: float) -> RenderedBoard:
    """Render one unit of a product, reproducibly. KeyError for an unknown board type (`board_types()`)."""
    rng = np.random.default_rng([seed, *board_type.encode()])
    board = board_types()[board_type]
    library = part_types()
    kinds = [
        str(rng.choice(library[place.component].defects)) if rng.random() < defect_rate else "ok"
        for place in board.places
    ]
    return render_unit(board, kinds, rng)


def render_unit(board: BoardType, kinds: list[str], rng: np.random.Generator) -> RenderedBoard:
    """Render a unit of a board type whose parts are in the given states (`ok` or a defect kind each)."""
    library = part_types()
    canvas = bare_board(board, rng)
    scene = _scene(board, rng)
    placed_parts: list[tuple[PartType, PartPlace, Condition, list[Box]]] = []
    for place, kind in zip(board.places, kinds, strict=True):
        part = library[place.component]
        condition = make_condition(part, kind, rng)
        placed_parts.append((part, place, condition, _place_part(canvas, part, place, condition, scene)))
    image = _photograph(canvas, rng)
    drift = (int(rng.integers(-2, 3)), int(rng.integers(-2, 3)))
    placements = tuple(
        _cut(image, part, place, condition, bridges, drift) for part, place, condition, bridges in placed_parts
    )
    return RenderedBoard(board.name, image, placements)


def _scene(board: BoardType, rng: np.random.Generator) -> BoardScene:
    angle, tilt = rng.uniform(0, 2 * np.pi), np.deg2rad(rng.uniform(30, 50))
    light = Light(float(np.cos(angle) * np.sin(tilt)), float(np.sin(angle) * np.sin(tilt)), float(np.cos(tilt)))
    grain = cv2.GaussianBlur(rng.standard_normal((512, 512), dtype=np.float32), (0, 0), 0.8) * 2
    return BoardScene(light=light, finish=board.finish, grain=grain.astype(np.float32), rng=rng)


def _place_part(canvas: Floats, part: PartType, place: PartPlace, condition: Condition, scene: BoardScene) -> list[Box]:
    """Draw one part onto the board; return the boxes of solder bridges around the part's centre."""
    side, scale = part.crop_px + 16, 2 if part.crop_px > 100 else 3
    light = scene.light.turned(place.quarter_turns)
    own = BoardScene(light=light, finish=scene.finish, grain=scene.grain, rng=scene.rng)
    ground, body, top = (Layer(side, scale) for _ in range(3))
    draw_ground(ground, part, condition, own)
    draw_flux(ground, part, own)
    draw_body(body, part, condition, own)
    body.pixels = np.ascontiguousarray(np.rot90(body.pixels, condition.quarter_turns))
    body.moved(condition.dx, condition.dy, condition.angle_deg)
    bridges = bridge_boxes(part, condition, scene.rng)
    draw_bridges(top, bridges, own)
    x, y = place.x - side // 2, place.y - side // 2
    window = canvas[y : y + side, x : x + side]
    shown = body.shown()
    height = part.thickness * (2.2 if condition.kind == "tombstone" else 1)
    shadow = _shadow(shown[..., 3], light, height)
    for sprite in (ground.shown(), shadow, shown, top.shown()) if bridges else (ground.shown(), shadow, shown):
        turned = np.rot90(sprite, place.quarter_turns)
        window *= channels(1 - turned[..., 3], 3)
        window += turned[..., :3]
    return bridges


def _shadow(cover: Floats, light: Light, height: float) -> Floats:
    shift = np.asarray([[1, 0, -light.x * height * 0.45], [0, 1, -light.y * height * 0.45]], np.float32)
    moved = cv2.warpAffine(cover, shift, cover.shape[::-1])
    soft = cv2.GaussianBlur(moved, (0, 0), 0.8 + height * 0.09)
    return np.dstack([np.zeros((*cover.shape, 3), np.float32), 0.55 * soft]).astype(np.float32)


def _photograph(canvas: Floats, rng: np.random.Generator) -> PixelArray:
    """Add uneven light, white balance, exposure, focus and sensor noise."""
    height, width = canvas.shape[:2]
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j].astype(np.float32)
    slope_x, slope_y, vignette = rng.uniform(-0.09, 0.09), rng.uniform(-0.09, 0.09), rng.uniform(0, 0.12)
    field = rng.uniform(0.92, 1.1) * (1 + slope_x * x + slope_y * y - vignette * (x * x + y * y) / 2)
    balance = rng.uniform(0.96, 1.04, 3)
    lit = np.clip(canvas, 0, 1) * (field[..., None] * balance).astype(np.float32)
    focused = cv2.GaussianBlur(lit, (0, 0), rng.uniform(0.35, 0.85))
    noise = rng.standard_normal((height, width, 3), dtype=np.float32) * np.float32(rng.uniform(0.006, 0.016))
    exposed = np.clip(focused + noise, 0, 1) ** np.float32(rng.uniform(0.8, 0.92))
    return np.round(exposed * 255).astype(np.uint8)


def _cut(
    image: PixelArray,
    part: PartType,
    place: PartPlace,
    condition: Condition,
    bridges: list[Box],
    drift: tuple[int, int],
) -> PartPlacement:
    """Cut a part out of the board image; the crop sits off by the board's drift, as after a fiducial fit."""
    side = part.crop_px
    x, y = place.x - side // 2 + drift[0], place.y - side // 2 + drift[1]
    turned = np.rot90(image[y : y + side, x : x + side], -place.quarter_turns)
    off = Light(*drift, 0).turned(place.quarter_turns)
    marks: list[SolderMark] = []
    if condition.kind == "ok" or condition.kind in ("bridge", "insufficient", "lifted_lead"):
        for mark in marks_of(part, condition, bridges):
            x1, y1, x2, y2 = mark.box
            left, right = (min(max(x + side / 2 - off.x, 0.0), side) for x in (x1, x2))
            top, bottom = (min(max(y + side / 2 - off.y, 0.0), side) for y in (y1, y2))
            marks.append(SolderMark(mark.label, (left, top, right, bottom)))
    return PartPlacement(
        designator=place.designator,
        component=part.name,
        truth=condition.kind,
        box=(x, y, x + side, y + side),
        quarter_turns=place.quarter_turns % 4,
        marks=tuple(marks),
        pixels=np.ascontiguousarray(turned),
    )
