"""From a payload to the square input of an expert, the same for training, import and the running line."""

from dataclasses import dataclass

import cv2
import numpy as np

from experts.spec import Box, ExpertSpec, Task
from experts.vision.decode import Encoding, Image, decode

#: What ultralytics fills a letterbox with.
LETTERBOX_GREY = 114


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a stored image of `width` × `height` pixels lies in a square input: x_square = x · gain_x + left."""

    width: int
    height: int
    gain_x: float
    gain_y: float
    left: int
    top: int

    def to_stored(self, box: tuple[float, float, float, float]) -> Box:
        """x1 y1 x2 y2 in the square, to stored pixels, cut at the image's edges."""
        x1, y1, x2, y2 = box
        return (
            _clamp((x1 - self.left) / self.gain_x, self.width),
            _clamp((y1 - self.top) / self.gain_y, self.height),
            _clamp((x2 - self.left) / self.gain_x, self.width),
            _clamp((y2 - self.top) / self.gain_y, self.height),
        )


@dataclass(frozen=True, slots=True)
class Prepared:
    """One image ready for a batch: (S, S, 3) uint8 RGB, and where the stored image lies in it."""

    pixels: Image
    placement: Placement


def prepare(payload: bytes, encoding: Encoding, shape: tuple[int, int, int] | None, spec: ExpertSpec) -> Prepared:
    """Decode a payload and fit it to the expert's input. `shape` is (h, w, c) of raw pixels. Raises ImageError."""
    return fit(decode(payload, encoding, shape), spec.task, spec.input_size)


def fit(image: Image, task: Task, size: int) -> Prepared:
    """A decoded image (H, W, 3) uint8 RGB as the input of an expert of this task."""
    height, width = image.shape[:2]
    placement = place(width, height, task, size)
    return Prepared(to_square(image, task, size), placement)


def place(width: int, height: int, task: Task, size: int) -> Placement:
    """Where `to_square` puts an image: classifiers fill the square, detectors keep the aspect ratio, centred."""
    if task == "classify":
        return Placement(width, height, size / width, size / height, 0, 0)
    inner_width, inner_height = _letterbox_size(width, height, size)
    # The rounding of ultralytics' LetterBox: an odd pixel of padding goes to the right and below.
    left, top = round((size - inner_width) / 2 - 0.1), round((size - inner_height) / 2 - 0.1)
    return Placement(width, height, inner_width / width, inner_height / height, left, top)


def to_square(image: Image, task: Task, size: int) -> Image:
    """(H, W, 3) uint8 RGB to (size, size, 3).

    A classifier's image is stretched, averaging when it shrinks (bilinear sampling would skip pixels). A detector's
    is letterboxed, bilinear, exactly as ultralytics' LetterBox(auto=False, scaleup=True, center=True).
    """
    height, width = image.shape[:2]
    if task == "classify":
        if (width, height) == (size, size):
            return np.ascontiguousarray(image)
        shrinks = width >= size and height >= size
        resized = cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        return np.asarray(resized, dtype=np.uint8)
    inner = _letterbox_size(width, height, size)
    placement = place(width, height, task, size)
    if inner != (width, height):
        image = np.asarray(cv2.resize(image, inner, interpolation=cv2.INTER_LINEAR), dtype=np.uint8)
    square = np.full((size, size, 3), LETTERBOX_GREY, dtype=np.uint8)
    square[placement.top : placement.top + inner[1], placement.left : placement.left + inner[0]] = image
    return square


def _letterbox_size(width: int, height: int, size: int) -> tuple[int, int]:
    ratio = min(size / height, size / width)
    return max(round(width * ratio), 1), max(round(height * ratio), 1)


def _clamp(value: float, limit: int) -> float:
    return float(min(max(value, 0.0), limit))
