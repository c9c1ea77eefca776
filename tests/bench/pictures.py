"""Real JPEG images for the benchmark: parts of rendered boards, as a camera would send them.

Random weights give random verdicts, so whether an image goes on to its detector is the trace's coin; the image
carries it, for every side sees only images: those that go on are `WIDTH_PX` + 1 pixels wide, the others `WIDTH_PX`.
"""

import cv2

from tools.camera.render import board_types, render_board

WIDTH_PX = 160
_JPEG_QUALITY = 90
_DEFECT_RATE = 0.08


def goes_on(width: int) -> bool:
    """What the image of this width carries."""
    return width != WIDTH_PX


def make_pictures(count: int, seed: int) -> list[tuple[bytes, bytes]]:
    """`count` parts as JPEG files, each in the width that stops and the width that goes on."""
    kinds = sorted(board_types())
    pictures: list[tuple[bytes, bytes]] = []
    number = 0
    while len(pictures) < count:
        for placement in render_board(kinds[number % len(kinds)], seed + number, _DEFECT_RATE).placements:
            crop = cv2.cvtColor(placement.crop(), cv2.COLOR_RGB2BGR)
            stops, onward = (_jpeg(crop, width) for width in (WIDTH_PX, WIDTH_PX + 1))
            pictures.append((stops, onward))
        number += 1
    return pictures[:count]


def _jpeg(crop: cv2.typing.MatLike, width: int) -> bytes:
    resized = cv2.resize(crop, (width, WIDTH_PX), interpolation=cv2.INTER_CUBIC)
    _, encoded = cv2.imencode(".jpg", resized, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
    return encoded.tobytes()
