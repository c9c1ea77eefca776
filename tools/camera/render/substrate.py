"""The bare board: laminate, traces under solder mask, vias, silkscreen, fiducials."""

import cv2
import numpy as np
from numpy.typing import NDArray

from tools.camera.render.layouts import BoardType, PartPlace
from tools.camera.render.parts import PartType, part_types
from tools.camera.render.surface import Floats, channels

Mask = NDArray[np.uint8]
_SUB = 3  # three fractional bits in the coordinates OpenCV draws at


def bare_board(board: BoardType, unit: np.random.Generator) -> Floats:
    """Return (height, width, 3) float32 in 0..1. The board type gives the design, the unit small deviations."""
    design = np.random.default_rng([5, board.design_seed])
    shape = (board.height, board.width)
    copper, vias, silk = (np.zeros(shape, np.uint8) for _ in range(3))
    _route(board, design, copper, vias)
    _print_silk(board, silk)
    tint = np.asarray(board.mask, np.float32) * unit.uniform(0.9, 1.12) + unit.uniform(-0.012, 0.012, 3)
    ground = np.clip(tint, 0.01, 1).astype(np.float32)
    image = np.broadcast_to(ground, (*shape, 3)).copy()
    raised = np.clip(ground * 1.45 + 0.035, 0, 1)
    _lay(image, copper, raised, 0.8)
    edges = cv2.Laplacian(cv2.GaussianBlur(copper, (0, 0), 1), cv2.CV_32F)[..., None] / 255
    image += np.clip(-edges, 0, 1) * 0.25
    _lay(image, vias, np.asarray(board.finish, np.float32) * 0.75, 0.9)
    shift = np.array([[1, 0, unit.uniform(-1.2, 1.2)], [0, 1, unit.uniform(-1.2, 1.2)]], np.float32)
    printed = cv2.warpAffine(silk, shift, silk.shape[::-1]).astype(np.uint8)
    _lay(image, printed, np.asarray(board.silk, np.float32), unit.uniform(0.75, 0.95))
    _features(board, image)
    return image


def _lay(image: Floats, mask: Mask, colour: Floats, opacity: float) -> None:
    cover = channels(mask.astype(np.float32) * (opacity / 255), 3)
    image *= 1 - cover
    image += cover * colour.astype(np.float32)


def _route(board: BoardType, design: np.random.Generator, copper: Mask, vias: Mask) -> None:
    """Draw a poured ground plane, an escape to a via for every pad, and bundles of lines across the board."""
    cv2.rectangle(copper, (18, 18), (board.width - 19, board.height - 19), 90, -1)
    for _ in range(4 + board.width // 220):
        _bundle(board, design, copper)
    library = part_types()
    for place in board.places:
        part = library[place.component]
        for pad in part.pads:
            if part.crop_px > 110 and design.random() < 0.25:
                continue
            start = _turned((pad.x, pad.y), place)
            out = _turned(pad.out, PartPlace("", "", 0, 0, place.quarter_turns))
            _escape(design, copper, vias, start, out, narrow=min(pad.w, pad.h) < 7)


def _bundle(board: BoardType, design: np.random.Generator, copper: Mask) -> None:
    """Draw parallel lines with 45-degree bends from edge to edge."""
    count, pitch, width = int(design.integers(3, 8)), int(design.integers(7, 11)), int(design.integers(2, 4))
    across = design.random() < 0.5
    span = board.width if across else board.height
    level = design.uniform(0.1, 0.9) * (board.height if across else board.width)
    knees, along = [(20.0, level)], 20.0
    while along < span - 60:
        along = min(span - 20.0, along + design.uniform(80, 300))
        knees.append((along, level))
        jump = design.uniform(-60, 60)
        if along + abs(jump) < span - 40:
            along, level = along + abs(jump), level + jump
            knees.append((along, level))
    for colour, thickness in ((20, width + 5), (215, width)):
        for k in range(count):
            line = np.array([(a, b + k * pitch) if across else (b + k * pitch, a) for a, b in knees])
            points = [np.round(line * 2**_SUB).astype(np.int32)]
            cv2.polylines(copper, points, False, colour, thickness, cv2.LINE_AA, _SUB)


def _escape(
    design: np.random.Generator,
    copper: Mask,
    vias: Mask,
    start: tuple[float, float],
    out: tuple[float, float],
    *,
    narrow: bool,
) -> None:
    straight, bend = design.uniform(10, 22), design.uniform(0, 16) * design.choice([-1, 1])
    knee = (start[0] + out[0] * straight, start[1] + out[1] * straight)
    end = (knee[0] + out[0] * abs(bend) - out[1] * bend, knee[1] + out[1] * abs(bend) + out[0] * bend)
    line = np.array([start, knee, end])
    points = [np.round(line * 2**_SUB).astype(np.int32)]
    width = 2 if narrow else 4
    for colour, thickness in ((20, width + 5), (215, width)):
        cv2.polylines(copper, points, False, colour, thickness, cv2.LINE_AA, _SUB)
    if design.random() < 0.6:
        centre = (round(end[0] * 2**_SUB), round(end[1] * 2**_SUB))
        cv2.circle(vias, centre, round(4.2 * 2**_SUB), 255, -1, cv2.LINE_AA, _SUB)
        cv2.circle(vias, centre, round(1.8 * 2**_SUB), 0, -1, cv2.LINE_AA, _SUB)


def _print_silk(board: BoardType, silk: Mask) -> None:
    library = part_types()
    for place in board.places:
        part = library[place.component]
        for outline, closed in _outlines(part):
            points = np.array([_turned(p, place) for p in outline])
            cv2.polylines(silk, [np.round(points * 2**_SUB).astype(np.int32)], closed, 255, 2, cv2.LINE_AA, _SUB)
        (text_w, text_h), _ = cv2.getTextSize(place.designator, cv2.FONT_HERSHEY_SIMPLEX, 0.36, 1)
        reach = _reach(part, place.quarter_turns)
        at = (int(place.x - text_w / 2), int(place.y - reach[1] - 6))
        if reach[0] < reach[1]:
            at = (int(place.x + reach[0] + 4), int(place.y + text_h / 2))
        cv2.putText(silk, place.designator, at, cv2.FONT_HERSHEY_SIMPLEX, 0.36, 255, 1, cv2.LINE_AA)
    cv2.putText(silk, board.title, (76, 52), cv2.FONT_HERSHEY_DUPLEX, 0.75, 255, 1, cv2.LINE_AA)
    cv2.rectangle(silk, (board.width - 250, 34), (board.width - 90, 58), 255, 1, cv2.LINE_AA)
    cv2.putText(silk, "SN", (board.width - 244, 51), cv2.FONT_HERSHEY_SIMPLEX, 0.42, 255, 1, cv2.LINE_AA)


def _outlines(part: PartType) -> list[tuple[list[tuple[float, float]], bool]]:
    """Return the silkscreen around a part, in part coordinates: polylines, and whether each is closed."""
    a, b = part.length / 2 + 3, part.width / 2 + 3
    match part.family:
        case "chip":
            gap = max(part.length / 2 - part.pads[1].w / 2 - 2, 2)
            return [([(-gap, s * b), (gap, s * b)], False) for s in (-1, 1)]
        case "led":
            x = part.length / 2 + 11
            return [([(x - 8, -b), (-x, -b), (-x, b), (x - 8, b)], False)]
        case "electrolytic":
            gap = part.pads[0].h / 2 + 3
            plus = [([(a + 4, -gap - 8), (a + 4, -gap - 2)], False), ([(a + 1, -gap - 5), (a + 7, -gap - 5)], False)]
            return [*(([(-a, s * gap), (-a, s * a), (a, s * a), (a, s * gap)], False) for s in (-1, 1)), *plus]
        case "qfp":
            corner = part.length / 2 + 2
            arms = [(sx * corner, sy * corner, sx, sy) for sx in (-1, 1) for sy in (-1, 1)]
            lines = [
                ([(x + 5 * sx - 9 * sx, y + 5 * sy), (x + 5 * sx, y + 5 * sy), (x + 5 * sx, y - 4 * sy)], False)
                for x, y, sx, sy in arms
            ]
            dot = (-corner - 9, corner + 9)
            return [*lines, ([(dot[0] - 1, dot[1]), (dot[0] + 1, dot[1])], True)]
        case _:
            dot = (-a - 5, part.pads[0].y)
            sides = [([(s * a, -b + 6), (s * a, b - 6)], False) for s in (-1, 1)]
            return [*sides, ([(dot[0] - 1, dot[1]), (dot[0] + 1, dot[1])], True)]


def _reach(part: PartType, quarter_turns: int) -> tuple[float, float]:
    x = max(part.length / 2, *(abs(p.x) + p.w / 2 for p in part.pads))
    y = max(part.width / 2, *(abs(p.y) + p.h / 2 for p in part.pads))
    return (y, x) if quarter_turns % 2 else (x, y)


def _turned(point: tuple[float, float], place: PartPlace) -> tuple[float, float]:
    x, y = point
    for _ in range(place.quarter_turns % 4):
        x, y = y, -x
    return place.x + x, place.y + y


def _features(board: BoardType, image: Floats) -> None:
    finish, dark = tuple(map(float, board.finish)), (0.03, 0.03, 0.035)
    for x in (34, board.width - 35):
        for y in (34, board.height - 35):
            cv2.circle(image, (x, y), 19, finish, -1, cv2.LINE_AA)
            cv2.circle(image, (x, y), 12, dark, -1, cv2.LINE_AA)
    for x, y in ((board.width // 2, 40), (40, board.height // 2), (board.width - 60, board.height - 90)):
        cv2.circle(image, (x, y), 11, tuple(0.5 * c for c in board.mask), -1, cv2.LINE_AA)
        cv2.circle(image, (x, y), 5, finish, -1, cv2.LINE_AA)
    cv2.rectangle(image, (0, 0), (board.width - 1, board.height - 1), (0.55, 0.5, 0.34), 3)
