"""Boards with verdicts drawn on, as an operator would want to see them."""

from pathlib import Path

import cv2
import numpy as np

from tools.camera.render import PartPlacement, RenderedBoard
from tools.demo.verdicts import PartVerdict

#: BGR, as OpenCV draws.
COLOURS = {"pass": (96, 200, 96), "fail": (48, 48, 235), "review": (40, 180, 245), "unknown": (200, 80, 200)}
_FONT = cv2.FONT_HERSHEY_SIMPLEX


def draw_board(board: RenderedBoard, serial: str, verdicts: dict[str, PartVerdict], path: Path) -> None:
    """Write `path` (PNG): each part framed in its verdict's colour, defects named, detectors' defect boxes inside."""
    canvas = cv2.cvtColor(board.image, cv2.COLOR_RGB2BGR)
    for placement in board.placements:
        found = verdicts.get(placement.designator)
        _draw_part(canvas, placement, found or PartVerdict("unknown", None, ()))
    cv2.imwrite(str(path), np.vstack([_header(canvas.shape[1], board, serial, verdicts), canvas]))


def _draw_part(canvas: np.ndarray, placement: PartPlacement, found: PartVerdict) -> None:
    colour = COLOURS[found.verdict]
    x1, y1, x2, y2 = placement.box
    cv2.rectangle(canvas, (x1, y1), (x2, y2), colour, 1 if found.verdict == "pass" else 2, cv2.LINE_AA)
    for _, _, box in found.boxes:
        left, top, right, bottom = (round(value) for value in placement.on_board(box))
        cv2.rectangle(canvas, (left, top), (right, bottom), COLOURS["review"], 1, cv2.LINE_AA)
    if found.verdict == "pass":
        return
    text = f"{placement.designator} {found.defect or found.verdict}"
    (width, height), _ = cv2.getTextSize(text, _FONT, 0.42, 1)
    left = min(x1, canvas.shape[1] - width - 4)
    bottom = y1 - 3 if y1 > height + 8 else y2 + height + 6
    cv2.rectangle(canvas, (left, bottom - height - 3), (left + width + 4, bottom + 3), colour, cv2.FILLED)
    cv2.putText(canvas, text, (left + 2, bottom), _FONT, 0.42, (255, 255, 255), 1, cv2.LINE_AA)


def _header(width: int, board: RenderedBoard, serial: str, verdicts: dict[str, PartVerdict]) -> np.ndarray:
    header = np.full((34, width, 3), 32, np.uint8)
    counts = {name: sum(found.verdict == name for found in verdicts.values()) for name in COLOURS}
    cv2.putText(header, f"{board.board_type}  {serial}", (10, 23), _FONT, 0.6, (240, 240, 240), 1, cv2.LINE_AA)
    x = width - 10
    for name, count in reversed(counts.items()):
        text = f"{name} {count}"
        x -= cv2.getTextSize(text, _FONT, 0.55, 1)[0][0]
        cv2.putText(header, text, (x, 23), _FONT, 0.55, COLOURS[name], 1, cv2.LINE_AA)
        x -= 18
    return header
