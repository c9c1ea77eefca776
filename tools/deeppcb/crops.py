"""Training examples out of pairs: windows of tiles, turned, scaled, with defects drawn on. The boxes come along."""

from dataclasses import dataclass

import cv2
import numpy as np

from tools.deeppcb.synthetic import Rng, Shapes, draw_defect
from tools.deeppcb.tiles import Boxes, Defect, Pair, Tile

#: Boxes whose centre is at least this far inside a window stay in it.
_CENTRE_INSET_PIXELS = 2


@dataclass(frozen=True, slots=True)
class CropSampler:
    """Square windows of `size` pixels, as `fit_detector` asks for them: (size, size) uint8 and (n, 5) boxes.

    `drawn_defects` is how many defects are drawn on one on average, `tested_share` how often the window is of a tested
    tile instead of a template.
    """

    pairs: list[Pair]
    shapes: Shapes
    size: int = 256
    drawn_defects: float = 3.0
    tested_share: float = 0.75

    def __call__(self, rng: Rng) -> tuple[Tile, Boxes]:
        pair = self.pairs[rng.integers(len(self.pairs))]
        if rng.random() < self.tested_share:
            tile, boxes = pair.test, pair.boxes
        else:
            tile, boxes = pair.template, pair.boxes[:0]
        scale = rng.uniform(0.85, 1.18) if rng.random() < 0.5 else 1.0
        window = min(*tile.shape, round(self.size / scale))
        tile, boxes = cut_window(tile, boxes, window, rng)
        boxes = draw_defects(tile, boxes, int(rng.poisson(self.drawn_defects)), self.shapes, rng)
        tile, boxes = rescale(tile, boxes, self.size, rng)
        tile, boxes = turn(tile, boxes, rng)
        return fade(tile, rng), boxes


def cut_window(tile: Tile, boxes: Boxes, side: int, rng: Rng) -> tuple[Tile, Boxes]:
    """A copy of a square window, mostly one with a defect in it, and the boxes whose centres it holds."""
    height, width = tile.shape
    if len(boxes) and rng.random() < 0.9:
        wanted = boxes[rng.integers(len(boxes))]
        left = (wanted[0] + wanted[2]) / 2 - rng.uniform(0.1, 0.9) * side
        top = (wanted[1] + wanted[3]) / 2 - rng.uniform(0.1, 0.9) * side
    else:
        left, top = rng.uniform(0, width - side), rng.uniform(0, height - side)
    x, y = int(np.clip(left, 0, width - side)), int(np.clip(top, 0, height - side))
    moved = boxes - np.array([x, y, x, y, 0], np.float32)
    centres = (moved[:, :2] + moved[:, 2:4]) / 2
    inside = ((centres > _CENTRE_INSET_PIXELS) & (centres < side - _CENTRE_INSET_PIXELS)).all(axis=1)
    moved = moved[inside]
    moved[:, :4] = moved[:, :4].clip(0, side)
    return tile[y : y + side, x : x + side].copy(), moved


def draw_defects(tile: Tile, boxes: Boxes, tries: int, shapes: Shapes, rng: Rng) -> Boxes:
    """Try so many defects of any kind on `tile`, in place; the boxes with those that found a place."""
    for _ in range(tries):
        drawn = draw_defect(tile, boxes, Defect(int(rng.integers(len(Defect)))), shapes, rng)
        if drawn is not None:
            boxes = np.concatenate([boxes, drawn[None]])
    return boxes


def rescale(tile: Tile, boxes: Boxes, size: int, rng: Rng) -> tuple[Tile, Boxes]:
    """To (size, size). Mostly made black and white again, as the data set's own scanning does."""
    side = tile.shape[0]
    if side == size:
        return tile, boxes
    tile = np.asarray(cv2.resize(tile, (size, size), interpolation=cv2.INTER_LINEAR), np.uint8)
    if rng.random() < 0.7:
        tile = np.where(tile >= 128, np.uint8(255), np.uint8(0))
    boxes = boxes.copy()
    boxes[:, :4] = (boxes[:, :4] * (size / side)).clip(0, size)
    return tile, boxes


def turn(tile: Tile, boxes: Boxes, rng: Rng) -> tuple[Tile, Boxes]:
    """One of the eight ways a square tile can lie: a defect is one whichever way the board was scanned."""
    size = tile.shape[0]
    x1, y1, x2, y2, kind = boxes.T
    for _ in range(rng.integers(4)):
        tile = np.rot90(tile)
        x1, y1, x2, y2 = y1, size - x2, y2, size - x1
    if rng.random() < 0.5:
        tile = tile[:, ::-1]
        x1, x2 = size - x2, size - x1
    return np.ascontiguousarray(tile), np.stack([x1, y1, x2, y2, kind], axis=1).astype(np.float32)


def fade(tile: Tile, rng: Rng) -> Tile:
    """Now and then a weaker contrast and another black: not every scanner is set as this one was."""
    if rng.random() >= 0.3:
        return tile
    gain, offset = rng.uniform(0.8, 1.0), rng.uniform(0, 51)
    return np.clip(tile * gain + offset, 0, 255).astype(np.uint8)
