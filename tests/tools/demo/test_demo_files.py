from pathlib import Path

import cv2
import pytest
import torch

from tools.camera.render import render_board
from tools.demo.run import COLOURS, JudgedBoard, PartVerdict, draw_board

torch.set_num_threads(1)


def test_a_drawn_board_is_a_png_of_the_board_with_a_header_and_frames(tmp_path: Path):
    board = render_board("sensor-node", 1, 0.0)
    first, second, *_ = board.placements
    side = first.pixels.shape[0]
    verdicts = {p.designator: PartVerdict("pass", None) for p in board.placements[2:]}
    inner = (side * 0.3, side * 0.3, side * 0.6, side * 0.6)
    verdicts[first.designator] = PartVerdict("fail", "bridge", [inner])
    draw_board(JudgedBoard("S1", board, "fail", verdicts), tmp_path / "S1.png")
    drawn = cv2.imread(str(tmp_path / "S1.png"))
    assert drawn is not None
    height, width = board.image.shape[:2]
    assert drawn.shape == (height + 34, width, 3)
    for placement, verdict in ((first, "fail"), (second, "unknown"), (board.placements[2], "pass")):
        x1, _, _, y2 = placement.box
        assert drawn[y2 + 34 - side // 3, x1].tolist() == pytest.approx(list(COLOURS[verdict]), abs=30), verdict
    left, top, _, _ = (round(value) for value in first.on_board(inner))
    assert drawn[top + 34 + 5, left].tolist() == pytest.approx(list(COLOURS["review"]), abs=30)
