"""Successive pictures from a video file, or from a camera that may be unplugged.

A camera buffers pictures, so all are taken and most thrown away: the one used is never an old one.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
from numpy.typing import NDArray

_MAX_PAUSE_S = 5.0
#: A camera that delivers nothing for this many reads in a row is gone.
_FAILED_READS = 3


class SourceError(OSError):
    """A source gives no pictures; the text says why and what to do."""


class VideoFile:
    """A recording, read as fast as possible; its clock is the recording's."""

    is_live = False  # no picture is missed while another is cut
    times_lost = 0

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise SourceError(f"no video {path}")
        self._path = path
        self._capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
        if not self._capture.isOpened():
            raise SourceError(
                f"{path} is not a readable video: it is damaged, still being written, or another kind of file"
            )
        self._frames = int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT))
        self._rate = self._capture.get(cv2.CAP_PROP_FPS) or 25.0
        self._taken = 0

    def advance(self) -> bool:
        """Take the next picture; False at the end, SourceError if the recording breaks off."""
        if self._capture.grab():
            self._taken += 1
            return True
        if self._taken < self._frames:
            raise SourceError(
                f"{self._path} ends after {self._taken} of {self._frames} pictures: it is cut off or damaged"
            )
        return False

    def picture(self) -> NDArray[Any]:
        """Decode the picture that `advance` took: (height, width, 3) uint8 BGR."""
        done, picture = self._capture.retrieve()
        if not done:
            raise SourceError(f"{self._path}: picture {self._taken} cannot be decoded")
        return picture

    @property
    def now_s(self) -> float:
        """The time of that picture, on the source's own clock, which cannot be set."""
        return (self._taken - 1) / self._rate

    def close(self) -> None:
        self._capture.release()


class CameraDevice:
    """A camera. When it is unplugged, it is opened again until it is back, or `stop` is set."""

    is_live = True

    def __init__(
        self, open_camera: Callable[[], cv2.VideoCapture], name: str, say: Callable[[str], None], stop: threading.Event
    ) -> None:
        """Open the camera; SourceError if that fails the first time. `say` tells a person."""
        self._open_camera = open_camera
        self._name = name
        self._say = say
        self._stop = stop
        self.times_lost = 0  # lines that were scanned while the camera was away belong to no picture
        self._capture = open_camera()
        if not self._capture.isOpened():
            raise SourceError(
                f"{name} does not open: is it plugged in, used by nothing else, and are you in the group `video`?"
            )

    def advance(self) -> bool:
        while not self._stop.is_set():
            if any(self._capture.grab() for _ in range(_FAILED_READS)):
                return True
            self._reopen()
        return False

    def picture(self) -> NDArray[Any]:
        done, picture = self._capture.retrieve()
        if not done:
            raise SourceError(f"{self._name}: a picture cannot be decoded")
        return picture

    @property
    def now_s(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self._capture.release()

    def _reopen(self) -> None:
        self.times_lost += 1
        self._say(f"{self._name} delivers no pictures: it was unplugged or has failed; trying again until it is back")
        pause_s = 0.5
        while not self._stop.is_set():
            self._capture.release()
            self._capture = self._open_camera()
            if self._capture.isOpened() and self._capture.grab():
                self._say(f"{self._name} is back")
                return
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


FrameSource = VideoFile | CameraDevice


def v4l2(device: str, size: tuple[int, int] | None, rate: float | None) -> Callable[[], cv2.VideoCapture]:
    """Return a function that opens a V4L2 camera, by number or path. It may choose a size and rate near these."""

    def open_camera() -> cv2.VideoCapture:
        settings: list[tuple[int, float]] = [(cv2.CAP_PROP_BUFFERSIZE, 1)]
        if size is not None:
            settings += [(cv2.CAP_PROP_FRAME_WIDTH, size[0]), (cv2.CAP_PROP_FRAME_HEIGHT, size[1])]
        if rate is not None:
            settings.append((cv2.CAP_PROP_FPS, rate))
        camera = cv2.VideoCapture(int(device) if device.isdigit() else device, cv2.CAP_V4L2)
        for setting, value in settings if camera.isOpened() else ():
            camera.set(setting, value)
        return camera

    return open_camera
