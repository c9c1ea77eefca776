"""A video in which rendered boards pass, with its layout and its serials: a station without a camera."""

from pathlib import Path

import cv2
import yaml

from tools.camera.render import BoardType, board_types, part_types, render_board

_RATE = 10.0
#: Pictures of each board; `--every` so many takes each board once.
PICTURES = 10
_CODECS = {".avi": "MJPG", ".mp4": "mp4v"}


def write_belt(
    video: Path, serials: list[str], seeds: list[int], defect_rate: float, board_type: str
) -> tuple[Path, Path]:
    """Write `video` (.avi: MJPG, .mp4: mp4v), and beside it the layout (.yaml) and the serials (.txt): their paths.

    ValueError for another suffix, OSError where OpenCV cannot write there.
    """
    codec = _CODECS.get(video.suffix.lower())
    if codec is None:
        raise ValueError(f"{video}: expected a name that ends with .avi or .mp4")
    board = board_types()[board_type]
    video.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(video), cv2.VideoWriter.fourcc(*codec), _RATE, (board.width, board.height))
    if not writer.isOpened():
        raise OSError(f"{video} cannot be written")
    for seed in seeds:
        picture = cv2.cvtColor(render_board(board_type, seed, defect_rate).image, cv2.COLOR_RGB2BGR)
        for _ in range(PICTURES):
            writer.write(picture)
    writer.release()
    layout, listed = video.with_suffix(".yaml"), video.with_suffix(".txt")
    layout.write_text(yaml.safe_dump(layout_of(board), sort_keys=False, default_flow_style=None), encoding="utf-8")
    listed.write_text("".join(f"{serial}\n" for serial in serials), encoding="utf-8")
    return layout, listed


def layout_of(board: BoardType) -> dict[str, object]:
    """Where the parts of a rendered board lie, as a layout file says it."""
    parts: dict[str, object] = {}
    for place in board.places:
        side = part_types()[place.component].crop_px
        x, y = place.x - side // 2, place.y - side // 2
        turn = place.quarter_turns % 4 * 90
        part: dict[str, object] = {"component": place.component, "box": [x, y, x + side, y + side]}
        parts[place.designator] = part | ({"turn": turn} if turn else {})
    return {"board": board.name, "size": [board.width, board.height], "parts": parts}
