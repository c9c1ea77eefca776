"""Decode payloads to pixels, (H, W, 3) uint8 RGB as stored, and fit these to the square input of an expert.

Training, import and the running line prepare images alike. Grey is repeated, alpha dropped, CMYK converted, 16 bits cut
to their high byte; orientation marks are ignored; of several pages the first counts. Anything that cannot be read
completely is an ImageError, never part of a picture: a decoder's warning counts as an error.
"""

import ctypes
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from experts.errors import ImageError
from experts.spec import Box, ExpertSpec, Task
from experts.vision import jpeg, tiff
from experts.vision.structure import check_size, check_structure

Encoding = Literal["image", "raw"]
#: Pixels: (H, W, 3) uint8 RGB.
Image = NDArray[np.uint8]

# Complaints of OpenCV and Pillow about a bad image become an ImageError; nothing goes to the daemon's stderr.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
warnings.filterwarnings("ignore", module=r"PIL\..*")
Pillow.MAX_IMAGE_PIXELS = None

for _library in {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libtiff" in line}:
    ctypes.CDLL(_library).TIFFSetErrorHandler(None)  # Pillow raises an error, and leaves libtiff's own output on

#: Pixels of the largest image that OpenCV decodes, the limit if a caller gives none.
MAX_PIXELS = 2**30
_READ = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION


def decode(
    payload: bytes, encoding: Encoding, shape: tuple[int, int, int] | None = None, max_pixels: int = MAX_PIXELS
) -> Image:
    """Return (H, W, 3) uint8 RGB. `shape` is (h, w, c) of a raw payload, c being 1 or 3. Raises ImageError.

    The number of pixels is compared with `max_pixels` as the decoder itself reads it, before it allocates them.
    """
    if encoding == "raw":
        return _decode_raw(payload, shape)
    if payload.startswith(tiff.SIGNATURES):
        return _decode_tiff(payload, max_pixels)
    check_structure(payload, max_pixels, to_end=False)
    if payload.startswith(jpeg.SIGNATURE):
        return _decode_jpeg(payload, max_pixels)
    return decode_opencv(payload)


def _decode_raw(payload: bytes, shape: tuple[int, int, int] | None) -> Image:
    if shape is None or shape[2] not in {1, 3} or min(shape) < 1 or len(payload) != shape[0] * shape[1] * shape[2]:
        raise ImageError(f"{len(payload)} raw bytes do not fit the shape {shape}")
    pixels = np.frombuffer(payload, dtype=np.uint8).reshape(shape)
    return np.repeat(pixels, 3, axis=2) if shape[2] == 1 else pixels


def _decode_jpeg(payload: bytes, max_pixels: int) -> Image:
    """`strict` makes warnings errors: libjpeg fills missing pixels with grey and only warns."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(payload)
        check_size(int(width), int(height), max_pixels)
        return np.asarray(simplejpeg.decode_jpeg(payload, "RGB", strict=True), dtype=np.uint8)
    except ValueError as error:
        raise ImageError(f"the JPEG is damaged or incomplete ({error})") from error


def decode_opencv(payload: bytes) -> Image:
    """Decode what has no decoder of its own here. The caller has checked the structure, or needs none."""
    try:
        image = cv2.imdecode(np.frombuffer(payload, dtype=np.uint8), _READ)
    except cv2.error as error:
        raise ImageError(f"the image cannot be decoded ({error.err})") from error
    if image is None:
        raise ImageError("the image is damaged, incomplete or of a kind that cannot be decoded")
    return np.asarray(image, dtype=np.uint8)


def _decode_tiff(payload: bytes, max_pixels: int) -> Image:
    """Use Pillow: OpenCV accepts damaged compressed data, and never sees libtiff's warnings about a JPEG."""
    page = tiff.first_page(payload)
    check_size(page.width, page.height, max_pixels)
    for part in tiff.jpegs(payload, page, tiff.parts(payload, page)):
        _decode_jpeg(part, max_pixels)
    try:
        with Pillow.open(io.BytesIO(tiff.upright(payload, page)), formats=("TIFF",)) as image:
            check_size(*image.size, max_pixels)
            image.load()
            pixels = np.array(image if image.mode.startswith("I;16") else image.convert("RGB"))
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError("this kind of TIFF is not read: send 8 or 16 bits, grey, RGB, palette or CMYK") from error
    except Exception as error:  # Pillow lets any error through that a damaged file causes.
        raise ImageError(f"the TIFF is damaged or incomplete ({error})") from error
    if pixels.ndim == 2:  # 16 bits of grey, in the file's byte order
        return np.repeat((pixels >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    return pixels


#: Grey with which ultralytics fills a letterbox.
LETTERBOX_GREY = 114


@dataclass(frozen=True, slots=True)
class Prepared:
    """One image ready for a batch: (S, S, 3) uint8 RGB, and where the stored image lies in it.

    A stored image of `width` × `height` pixels lies at x_square = x · gain_x + left.
    """

    pixels: Image
    width: int
    height: int
    gain_x: float
    gain_y: float
    left: int
    top: int

    def to_stored(self, box: tuple[float, float, float, float]) -> Box:
        """Map x1 y1 x2 y2 from the square to stored pixels, cut at the image's edges."""
        x1, y1, x2, y2 = box
        return (
            _clamp((x1 - self.left) / self.gain_x, self.width),
            _clamp((y1 - self.top) / self.gain_y, self.height),
            _clamp((x2 - self.left) / self.gain_x, self.width),
            _clamp((y2 - self.top) / self.gain_y, self.height),
        )


def prepare(
    payload: bytes,
    encoding: Encoding,
    shape: tuple[int, int, int] | None,
    spec: ExpertSpec,
    max_pixels: int = MAX_PIXELS,
) -> Prepared:
    """Decode a payload and fit it to the expert's input. `shape` is (h, w, c) of raw pixels. Raises ImageError."""
    return fit(decode(payload, encoding, shape, max_pixels), spec.task, spec.input_size)


def fit(image: Image, task: Task, size: int) -> Prepared:
    """Fit a decoded image (H, W, 3) uint8 RGB to the input of an expert of this task."""
    height, width = image.shape[:2]
    inner_width, inner_height = size_in_square(width, height, task, size)
    left, top = _margins(inner_width, inner_height, size)
    square = to_square(image, task, size)
    return Prepared(square, width, height, inner_width / width, inner_height / height, left, top)


def size_in_square(width: int, height: int, task: Task, size: int) -> tuple[int, int]:
    """Return width and height of an image in the square: classifiers fill it, detectors keep the aspect ratio."""
    if task == "classify":
        return size, size
    ratio = min(size / height, size / width)
    return max(round(width * ratio), 1), max(round(height * ratio), 1)


def _margins(inner_width: int, inner_height: int, size: int) -> tuple[int, int]:
    # The rounding of ultralytics' LetterBox: an odd pixel of padding goes to the right and below.
    return round((size - inner_width) / 2 - 0.1), round((size - inner_height) / 2 - 0.1)


def to_square(image: Image, task: Task, size: int) -> Image:
    """(H, W, 3) uint8 RGB to (size, size, 3).

    A classifier's image is stretched, averaging when it shrinks (bilinear sampling would skip pixels). A detector's is
    letterboxed, bilinear, exactly as ultralytics' LetterBox(auto=False, scaleup=True, center=True).
    """
    height, width = image.shape[:2]
    if task == "classify":
        if (width, height) == (size, size):
            return np.ascontiguousarray(image)
        shrinks = width >= size and height >= size
        resized = cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        return np.asarray(resized, dtype=np.uint8)
    inner = size_in_square(width, height, task, size)
    left, top = _margins(*inner, size)
    if inner != (width, height):
        image = np.asarray(cv2.resize(image, inner, interpolation=cv2.INTER_LINEAR), dtype=np.uint8)
    square = np.full((size, size, 3), LETTERBOX_GREY, dtype=np.uint8)
    square[top : top + inner[1], left : left + inner[0]] = image
    return square


def _clamp(value: float, limit: int) -> float:
    return float(min(max(value, 0.0), limit))
