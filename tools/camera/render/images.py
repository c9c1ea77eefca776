"""Rendered boards in place of a camera: their parts as images to publish, or a video in which they pass."""

import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import yaml

from coserve_client import CameraImage
from tools.camera.layout import board_fields
from tools.camera.render import BoardType, RenderedBoard, board_types, part_types, render_board

#: The share of parts with a defect. Real lines have fewer; a demo has to show some, and some boards have to pass.
DEFECT_RATE = 0.01
#: Seeds of published boards lie above those that training and its held-out boards draw from.
FIRST_SEED = 1_000_000
_VIDEO_BOARD = "sensor-node"
_VIDEO_FPS = 10.0
#: Pictures of each board in a video; `--every` with this number takes each board once.
VIDEO_PICTURES = 10
_CODECS = {".avi": "MJPG", ".mp4": "mp4v"}


def board_plan(boards: int, seed: int, prefix: str) -> list[tuple[str, str, int]]:
    """Return serial, board type and seed of each board: the types in turn, another seed for every board."""
    types = sorted(board_types())
    return [
        (f"{prefix}-{number + 1:03d}", types[number % len(types)], FIRST_SEED + seed * 10_000 + number)
        for number in range(boards)
    ]


def new_prefix() -> str:
    """Return a prefix for serials that changes every second."""
    return f"R{int(time.time()):x}"


def count_parts(boards: int) -> int:
    return sum(len(board_types()[board_type].places) for _, board_type, _ in board_plan(boards, 0, ""))


def rendered_images(boards: int, seed: int, prefix: str, lot: str | None) -> Iterator[CameraImage]:
    for serial, board_type, board_seed in board_plan(boards, seed, prefix):
        yield from images_of(render_board(board_type, board_seed, DEFECT_RATE), serial, lot)


def images_of(board: RenderedBoard, serial: str, lot: str | None) -> Iterator[CameraImage]:
    for part in board.placements:
        _, payload = cv2.imencode(".png", cv2.cvtColor(part.pixels, cv2.COLOR_RGB2BGR))
        yield CameraImage(
            f"{serial}/{part.designator}",
            payload.tobytes(),
            board_fields(board.board_type, serial, lot),
            part.component,
            {"designator": part.designator},
        )


def write_video(video: Path, boards: int, seed: int, prefix: str) -> tuple[Path, Path]:
    """Write boards of one type that pass in `video` (.avi: MJPG, .mp4: mp4v), and return its layout and its serials.

    They stand beside it (.yaml, .txt). ValueError for another suffix, OSError if OpenCV cannot write there.
    """
    codec = _CODECS.get(video.suffix.lower())
    if codec is None:
        raise ValueError(f"{video}: expected a name that ends with .avi or .mp4")
    board = board_types()[_VIDEO_BOARD]
    video.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(video), cv2.VideoWriter.fourcc(*codec), _VIDEO_FPS, (board.width, board.height))
    if not writer.isOpened():
        raise OSError(f"{video} cannot be written")
    plan = board_plan(boards, seed, prefix)
    for _, _, board_seed in plan:
        picture = cv2.cvtColor(render_board(_VIDEO_BOARD, board_seed, DEFECT_RATE).image, cv2.COLOR_RGB2BGR)
        for _ in range(VIDEO_PICTURES):
            writer.write(picture)
    writer.release()
    layout, serials = video.with_suffix(".yaml"), video.with_suffix(".txt")
    layout.write_text(yaml.safe_dump(_layout_of(board), sort_keys=False, default_flow_style=None), encoding="utf-8")
    serials.write_text("".join(f"{serial}\n" for serial, _, _ in plan), encoding="utf-8")
    return layout, serials


def _layout_of(board: BoardType) -> dict[str, object]:
    parts: dict[str, object] = {}
    for position in board.places:
        side = part_types()[position.component].crop_px
        x, y = position.x - side // 2, position.y - side // 2
        part: dict[str, object] = {"component": position.component, "box": [x, y, x + side, y + side]}
        turn = position.quarter_turns % 4 * 90
        parts[position.designator] = part | ({"turn": turn} if turn else {})
    return {"board": board.name, "size": [board.width, board.height], "parts": parts}
