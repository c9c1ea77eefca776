"""What the name and the bytes of a file say: a part, `BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png`, or a whole board."""

from pathlib import PurePosixPath
from typing import Any

import cv2
import numpy as np

from coserve_client import CameraImage
from tools.camera.layout import Layout, WrongSizeError, cut
from tools.camera.station import key
from tools.camera.watch_folder import Dropped
from tools.camera.watching import ImagesOf, UnfitError, content_id


def board_of(kind: str, serial: str, lot: str | None) -> dict[str, Any]:
    """`board` of the wire."""
    return {"type": kind, "serial": serial} | ({"lot": lot} if lot else {})


def parts(lot: str | None) -> ImagesOf:
    """A file is one part, its path says which."""

    def images_of(dropped: Dropped) -> list[CameraImage]:
        path = PurePosixPath(dropped.name)
        if len(path.parts) != 3 or "." not in path.stem:
            raise UnfitError("expected BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png (or .jpg, .bmp, .tif)")
        designator, component = path.stem.split(".", 1)
        kind, serial = path.parts[:2]
        image_id = content_id(f"{key(serial)}/{key(designator)}", dropped)
        board = board_of(kind, serial, lot)
        return [CameraImage(image_id, dropped.content, board, component, {"designator": designator})]

    return images_of


def whole_boards(layout: Layout, lot: str | None) -> ImagesOf:
    """A file is a picture of a whole board, its name is the serial."""

    def images_of(dropped: Dropped) -> list[CameraImage]:
        serial = PurePosixPath(dropped.name).stem
        picture = cv2.imdecode(np.frombuffer(dropped.content, np.uint8), cv2.IMREAD_COLOR)
        if picture is None:
            raise UnfitError("it cannot be decoded")
        try:
            found = cut(picture, layout)
        except WrongSizeError as error:
            raise UnfitError(str(error)) from None
        board = board_of(layout.board, serial, lot)
        return [
            CameraImage(
                content_id(key(serial), dropped, number),
                part.png,
                board,
                part.component,
                {"designator": part.designator},
            )
            for number, part in enumerate(found)
        ]

    return images_of
