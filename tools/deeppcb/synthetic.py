"""Defects drawn on real tiles: 400 pairs hold 2,600 defects, which a network learns by heart; drawn ones never end.

Small shapes (pin-holes, spurious copper, bites, spurs) are real ones, cut out of the difference between the training
pairs' tiles, turned and put elsewhere; opens and shorts are ragged bars across a trace or a gap. Where a defect may be
follows from what it is: a pin-hole lies inside copper, a spur stands on an edge, a short ends on other copper.
"""

from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from tools.deeppcb.tiles import Boxes, Defect, Pair, Tile, is_copper

Mask = NDArray[np.bool_]
Rng = np.random.Generator

COPPER, BARE = 0, 255
#: The data set's boxes lie this far around the changed pixels (measured on its training pairs: 9 to 12).
_MARGIN_PIXELS = (9, 13)
#: Where the pairs differ lies inside a box, but not near its edge: what is there is misalignment.
_MINE_INSET_PIXELS = 4
_LEAST_SHAPE_PIXELS, _LEAST_CHANGE_PIXELS, _LARGEST_BOX_PIXELS = 12, 10, 110
#: Gap between two boxes: touching defects would be one defect with two labels.
_GAP_PIXELS = 4
_LONGEST_BAR_PIXELS = 70
#: A bite or spur of which less than this share changes pixels is no longer the shape that was mined.
_LEAST_EDGE_SHARE = 0.35


@dataclass(frozen=True, slots=True)
class Shapes:
    """Outlines of real defects: those on an edge (bites, spurs) and those in a plane (pin-holes, spurious copper)."""

    edge: tuple[Mask, ...]
    plane: tuple[Mask, ...]


def mine_shapes(pairs: list[Pair]) -> Shapes:
    """The shapes in which the pairs' tiles differ inside their boxes; a disc where a kind has none."""
    found: dict[Defect, list[Mask]] = {defect: [] for defect in Defect}
    for pair in pairs:
        changed = (is_copper(pair.test) ^ is_copper(pair.template)).astype(np.uint8)
        changed = cv2.morphologyEx(changed, cv2.MORPH_OPEN, np.ones((2, 2), np.uint8))
        for x1, y1, x2, y2, kind in pair.boxes.astype(int):
            inset = _MINE_INSET_PIXELS
            shape = _largest_part(changed[y1 + inset : y2 - inset, x1 + inset : x2 - inset])
            if shape is not None:
                found[Defect(kind)].append(shape)
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (9, 9)).astype(bool)
    edge = found[Defect.MOUSEBITE] + found[Defect.SPUR]
    plane = found[Defect.COPPER] + found[Defect.PIN_HOLE]
    return Shapes(tuple(edge or [disc]), tuple(plane or [disc]))


def _largest_part(changed: NDArray[Any]) -> Mask | None:
    if changed.size == 0:
        return None
    count, parts, boxes, _ = cv2.connectedComponentsWithStats(changed.astype(np.uint8))
    if count < 2:
        return None
    largest = 1 + int(np.argmax(boxes[1:, cv2.CC_STAT_AREA]))
    x, y, width, height, area = (int(value) for value in boxes[largest])
    return parts[y : y + height, x : x + width] == largest if area >= _LEAST_SHAPE_PIXELS else None


def draw_defect(tile: Tile, boxes: Boxes, defect: Defect, shapes: Shapes, rng: Rng) -> NDArray[np.float32] | None:
    """Draw one defect into `tile`, in place, clear of `boxes`; returns its row (x1 y1 x2 y2 class).

    None where the place that was drawn by lot does not take it; the tile is then as it was.
    """
    if defect in {Defect.COPPER, Defect.PIN_HOLE}:
        change = _in_a_plane(tile, defect, shapes, rng)
    elif defect in {Defect.MOUSEBITE, Defect.SPUR}:
        change = _on_an_edge(tile, defect, shapes, rng)
    else:
        change = _across(tile, defect, rng)
    if change is None:
        return None
    ink = COPPER if defect in {Defect.SHORT, Defect.SPUR, Defect.COPPER} else BARE
    changed = change & (is_copper(tile) != (ink == COPPER))
    box = _box_around(changed, rng)
    if box is None or _touches(box, boxes):
        return None
    tile[changed] = ink
    return np.array([*box, defect], np.float32)


def _in_a_plane(tile: Tile, defect: Defect, shapes: Shapes, rng: Rng) -> Mask | None:
    """A pin-hole well inside copper, or copper well outside of it."""
    shape = _any_shape(shapes.plane, rng)
    material = is_copper(tile) if defect == Defect.PIN_HOLE else ~is_copper(tile)
    depth = cv2.distanceTransform(material.astype(np.uint8), cv2.DIST_L2, 3)
    place = _any_place(depth > max(shape.shape) / 2 + 2 + rng.uniform(0, 4), rng)
    return None if place is None else _placed(shape, place, tile.shape)


def _on_an_edge(tile: Tile, defect: Defect, shapes: Shapes, rng: Rng) -> Mask | None:
    """A bite lies a little inside the edge, a spur a little outside; enough of either must change the tile."""
    place = _any_place(_edge(tile), rng)
    inwards = None if place is None else _inwards(tile, place)
    if place is None or inwards is None:
        return None
    shape = _any_shape(shapes.edge, rng)
    depth = rng.uniform(-0.15, 0.35) * min(shape.shape) * (1 if defect == Defect.MOUSEBITE else -1)
    centre = (round(place[0] + inwards[0] * depth), round(place[1] + inwards[1] * depth))
    mask = _placed(shape, centre, tile.shape)
    if mask is None:
        return None
    changes = np.count_nonzero(mask & (is_copper(tile) == (defect == Defect.MOUSEBITE)))
    return mask if changes >= _LEAST_EDGE_SHARE * np.count_nonzero(shape) else None


def _across(tile: Tile, defect: Defect, rng: Rng) -> Mask | None:
    """A bar with ragged sides from an edge to the one opposite: through the trace (open), over the gap (short)."""
    place = _any_place(_edge(tile), rng)
    inwards = None if place is None else _inwards(tile, place)
    if place is None or inwards is None:
        return None
    forward = np.array(inwards) * (1 if defect == Defect.OPEN else -1)
    length = _length_to_other_edge(tile, place, forward, through_copper=defect == Defect.OPEN)
    if length is None:
        return None
    half = (rng.uniform(4, 16) if rng.random() < 0.75 else rng.uniform(12, 34)) / 2
    sideways = np.array([-forward[1], forward[0]])
    along = np.array(place) + forward * (np.linspace(0, length + 3, 6)[:, None] - 2)
    left = along + sideways * (half + rng.normal(0, 1.2, (6, 1)))
    right = along - sideways * (half + rng.normal(0, 1.2, (6, 1)))
    outline = np.round(np.concatenate([left, right[::-1]])).astype(np.int32)
    mask = np.zeros(tile.shape, np.uint8)
    cv2.fillPoly(mask, [outline], [1])
    return mask.astype(bool)


def _length_to_other_edge(
    tile: Tile, place: tuple[int, int], forward: NDArray[np.float64], *, through_copper: bool
) -> int | None:
    height, width = tile.shape
    for length in range(3, _LONGEST_BAR_PIXELS):
        x, y = (round(float(value)) for value in np.array(place) + forward * length)
        if not (0 <= x < width and 0 <= y < height):
            return None
        # The first pixels may still be on the edge that the bar starts from.
        if length > 4 and (tile[y, x] < 128) != through_copper:
            return length
    return None


def _edge(tile: Tile) -> Mask:
    """Copper pixels with a neighbour that is bare."""
    copper = is_copper(tile)
    return copper & (cv2.erode(copper.astype(np.uint8), np.ones((3, 3), np.uint8)) == 0)


def _inwards(tile: Tile, place: tuple[int, int]) -> tuple[float, float] | None:
    """The unit vector into the copper at an edge, from the copper around it; None where there is no clear one."""
    x, y = place
    around = is_copper(tile[max(0, y - 4) : y + 5, max(0, x - 4) : x + 5])
    if around.shape != (9, 9):
        return None
    rows, columns = np.mgrid[-4:5, -4:5]
    right, down = float((around * columns).sum()), float((around * rows).sum())
    length = float(np.hypot(right, down))
    return None if length < 20 else (right / length, down / length)


def _any_shape(shapes: tuple[Mask, ...], rng: Rng) -> Mask:
    shape = np.rot90(shapes[int(rng.integers(len(shapes)))], int(rng.integers(4)))
    return shape[:, ::-1] if rng.random() < 0.5 else shape


def _any_place(possible: NDArray[np.bool_], rng: Rng) -> tuple[int, int] | None:
    places = np.flatnonzero(possible)
    if len(places) == 0:
        return None
    y, x = divmod(int(places[rng.integers(len(places))]), possible.shape[1])
    return x, y


def _placed(shape: Mask, centre: tuple[int, int], tile_shape: tuple[int, ...]) -> Mask | None:
    height, width = shape.shape
    x, y = centre[0] - width // 2, centre[1] - height // 2
    if x < 1 or y < 1 or x + width >= tile_shape[1] or y + height >= tile_shape[0]:
        return None
    mask = np.zeros(tile_shape, bool)
    mask[y : y + height, x : x + width] = shape
    return mask


def _box_around(changed: Mask, rng: Rng) -> tuple[float, float, float, float] | None:
    """The box the data set would have, cut at the tile's edges; None for what is too small or too large to be one."""
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    if np.count_nonzero(changed) < _LEAST_CHANGE_PIXELS:
        return None
    margin = int(rng.integers(*_MARGIN_PIXELS))
    x1, y1, x2, y2 = columns[0] - margin, rows[0] - margin, columns[-1] + margin, rows[-1] + margin
    if max(x2 - x1, y2 - y1) > _LARGEST_BOX_PIXELS:
        return None
    height, width = changed.shape
    return float(max(x1, 0)), float(max(y1, 0)), float(min(x2, width)), float(min(y2, height))


def _touches(box: tuple[float, float, float, float], boxes: Boxes) -> bool:
    x1, y1, x2, y2 = box
    gap = _GAP_PIXELS
    beside = (boxes[:, 0] - gap >= x2) | (boxes[:, 2] + gap <= x1)
    above = (boxes[:, 1] - gap >= y2) | (boxes[:, 3] + gap <= y1)
    return bool((~(beside | above)).any())
