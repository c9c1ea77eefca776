"""Reads the verdicts of a board's parts from the database, and draws them on the board for an operator."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from sqlalchemy import text

from daemon.config.settings import load_config
from daemon.storage.database.connections import StoreError, open_for_reading
from tools.camera.render import PartPlacement, RenderedBoard

_PARTS = """
SELECT i.inspection_id, i.designator, i.verdict, i.defect FROM inspections AS i
JOIN boards AS b ON b.board_id = i.board_id WHERE b.serial = :serial AND i.status = 'done'
"""
_BOXES = """
SELECT d.inspection_id, d.label, d.confidence, d.x1, d.y1, d.x2, d.y2 FROM detections AS d
JOIN inspections AS i ON i.inspection_id = d.inspection_id
JOIN boards AS b ON b.board_id = i.board_id WHERE b.serial = :serial
"""
#: BGR, as OpenCV draws.
COLOURS = {"pass": (96, 200, 96), "fail": (48, 48, 235), "review": (40, 180, 245), "unknown": (200, 80, 200)}
_FONT = cv2.FONT_HERSHEY_SIMPLEX


@dataclass(frozen=True, slots=True)
class PartVerdict:
    """A part's verdict; boxes are (label, confidence, (x1, y1, x2, y2)) in pixels of the part's image."""

    verdict: str
    defect: str | None
    boxes: tuple[tuple[str, float, tuple[float, float, float, float]], ...]


def part_verdicts(config: Path, serial: str) -> dict[str, PartVerdict]:
    """Return the verdicts of the board `serial` by designator; empty if the line has not seen the board."""
    try:
        engine = open_for_reading(load_config(config).database)
    except StoreError:
        return {}
    try:
        with engine.connect() as connection:
            boxes = defaultdict(list)
            for inspection_id, label, confidence, *box in connection.execute(text(_BOXES), {"serial": serial}):
                boxes[inspection_id].append((label, confidence, tuple(box)))
            return {
                designator: PartVerdict(verdict, defect, tuple(boxes[inspection_id]))
                for inspection_id, designator, verdict, defect in connection.execute(text(_PARTS), {"serial": serial})
            }
    finally:
        engine.dispose()


def draw_board(board: RenderedBoard, serial: str, verdicts: dict[str, PartVerdict], path: Path) -> None:
    """Write `path` (PNG): each part framed in its verdict's colour, with its defect's name and the detector's boxes."""
    canvas = cv2.cvtColor(board.image, cv2.COLOR_RGB2BGR)
    for placement in board.placements:
        _draw_part(canvas, placement, verdicts.get(placement.designator) or PartVerdict("unknown", None, ()))
    cv2.imwrite(str(path), np.vstack([_header(canvas.shape[1], board, serial, verdicts), canvas]))


def _draw_part(canvas: np.ndarray, placement: PartPlacement, part: PartVerdict) -> None:
    colour = COLOURS[part.verdict]
    x1, y1, x2, y2 = placement.box
    cv2.rectangle(canvas, (x1, y1), (x2, y2), colour, 1 if part.verdict == "pass" else 2, cv2.LINE_AA)
    for _, _, box in part.boxes:
        left, top, right, bottom = (round(value) for value in placement.on_board(box))
        cv2.rectangle(canvas, (left, top), (right, bottom), COLOURS["review"], 1, cv2.LINE_AA)
    if part.verdict == "pass":
        return
    title = f"{placement.designator} {part.defect or part.verdict}"
    (width, height), _ = cv2.getTextSize(title, _FONT, 0.42, 1)
    left = min(x1, canvas.shape[1] - width - 4)
    bottom = y1 - 3 if y1 > height + 8 else y2 + height + 6
    cv2.rectangle(canvas, (left, bottom - height - 3), (left + width + 4, bottom + 3), colour, cv2.FILLED)
    cv2.putText(canvas, title, (left + 2, bottom), _FONT, 0.42, (255, 255, 255), 1, cv2.LINE_AA)


def _header(width: int, board: RenderedBoard, serial: str, verdicts: dict[str, PartVerdict]) -> np.ndarray:
    header = np.full((34, width, 3), 32, np.uint8)
    counts = {name: sum(part.verdict == name for part in verdicts.values()) for name in COLOURS}
    cv2.putText(header, f"{board.board_type}  {serial}", (10, 23), _FONT, 0.6, (240, 240, 240), 1, cv2.LINE_AA)
    x = width - 10
    for name, count in reversed(counts.items()):
        title = f"{name} {count}"
        x -= cv2.getTextSize(title, _FONT, 0.55, 1)[0][0]
        cv2.putText(header, title, (x, 23), _FONT, 0.55, COLOURS[name], 1, cv2.LINE_AA)
        x -= 18
    return header
