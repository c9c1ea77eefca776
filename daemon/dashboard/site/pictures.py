"""Pictures of the images that were kept, requested by inspection and never by file name.

The database's path is not trusted: it must lie below the images folder, without a link on its way.
"""

import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from PIL import ExifTags, Image
from PIL.TiffImagePlugin import TiffImageFile
from starlette.responses import Response, StreamingResponse

from experts.errors import ImageError

#: Widths in pixels in which a picture may be requested: for lists and cards, and for a desktop screen.
WIDTHS = (480, 1600)
_MEDIA_TYPES = {".jpg": "image/jpeg", ".png": "image/png", ".bmp": "image/bmp"}
#: Formats that browsers do not show: sent as PNG if the picture is small enough to be unpacked.
_CONVERTED = (".tif", ".pgm", ".ppm")
#: The formats that intake accepts. Pillow knows dozens more, and starts programs for some.
_FORMATS = ("JPEG", "PNG", "BMP", "TIFF", "PPM")
#: Pictures whose header names more pixels (of four bytes) are not unpacked.
_MAX_UNPACKED_PIXELS = 25_000_000
_CHUNK_BYTES = 256 * 1024
_QUALITY = 90
_UNREADABLE = (OSError, ValueError, SyntaxError, ImageError, Image.DecompressionBombError)


class NoPicture(Exception):  # noqa: N818
    """No picture can be shown; the text says why."""


class PictureSize(NamedTuple):
    """Stored pixels, before any EXIF turn: boxes are measured in them."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """A kept picture, open and not read yet. Close it, or send its `response`."""

    file: BinaryIO
    suffix: str
    length_bytes: int
    version: str

    def headers(self, width: int) -> dict[str, str]:
        """Let browsers revalidate each time, so that a pruned picture leaves every screen."""
        return {"Cache-Control": "private, no-cache", "ETag": f'"{self.version}-{width}"'}

    @property
    def is_converted(self) -> bool:
        return self.suffix in _CONVERTED

    def response(self, width: int) -> Response:
        """Reduce to `width` pixels; send whole what cannot be decoded here. NoPicture if browsers cannot show it."""
        headers = self.headers(width)
        reduced = _reduced(self.file, width) if width else None
        if reduced is None and self.suffix in _MEDIA_TYPES:
            headers["Content-Length"] = str(self.length_bytes)
            return StreamingResponse(self._chunks(), media_type=_MEDIA_TYPES[self.suffix], headers=headers)
        with self.file as file:
            if reduced is not None:
                return Response(reduced, media_type="image/jpeg", headers=headers)
            return Response(_as_png(file), media_type="image/png", headers=headers)

    def _chunks(self) -> Iterator[bytes]:
        with self.file as file:
            file.seek(0)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk


class PictureFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._size = lru_cache(maxsize=4096)(self._measure)

    def open(self, image_path: str) -> StoredPicture:
        """Open `images/DAY/THOUSANDS/ID.jpg`; NoPicture if it was pruned or may not be shown."""
        top, *parts = PurePosixPath(image_path).parts or ("",)
        suffix = PurePosixPath(image_path).suffix
        if suffix not in (*_MEDIA_TYPES, *_CONVERTED):
            raise NoPicture("this image's format is one that browsers do not show")
        try:
            file = self._folder.resolve().joinpath(*parts)
            if top != self._folder.name or file.resolve() != file or not file.is_relative_to(self._folder.resolve()):
                raise NoPicture("its path leads out of the images folder")
            # Opening a pipe without O_NONBLOCK would block.
            fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NoPicture("the picture was pruned") from None
        except (OSError, ValueError, RuntimeError) as error:  # a loop of links is a RuntimeError
            raise NoPicture(f"the picture cannot be read: {getattr(error, 'strerror', error)}") from None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise NoPicture("it is not a regular file")
        version = f"{status.st_mtime_ns:x}-{status.st_size:x}"
        return StoredPicture(os.fdopen(fd, "rb"), suffix, status.st_size, version)

    def size(self, image_path: str | None) -> PictureSize | None:
        try:
            return self._size(image_path) if image_path else None
        except (NoPicture, *_UNREADABLE):  # not cached: it may be put back
            return None

    def _measure(self, image_path: str) -> PictureSize:
        with self.open(image_path).file as file, Image.open(file, formats=_FORMATS) as image:
            width, height = image.size  # Pillow states a TIFF's as turned by its orientation mark
            is_turned = isinstance(image, TiffImageFile) and image.tag_v2.get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
            return PictureSize(height, width) if is_turned else PictureSize(width, height)


def _reduced(file: BinaryIO, width: int) -> bytes | None:
    """Return a JPEG of that width, None if the picture is not wider or cannot be decoded here."""
    try:
        with _opened(file) as image:
            if image.width <= width:
                return None
            size = (width, max(1, round(image.height * width / image.width)))
            image.draft(None, (2 * size[0], 2 * size[1]))  # a JPEG is unpacked no larger than needed
            eight_bits = image.convert("L" if image.mode in ("1", "L") else "RGB")
            reduced = eight_bits.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)
            jpeg = io.BytesIO()
            reduced.save(jpeg, "JPEG", quality=_QUALITY, subsampling=0)
    except (NoPicture, *_UNREADABLE):
        return None
    return jpeg.getvalue()


def _opened(file: BinaryIO) -> Image.Image:
    """Open a picture as experts see it; 16 bits and TIFFs, which Pillow turns, are decoded. NoPicture if too large."""
    image = Image.open(file, formats=_FORMATS)
    if image.width * image.height > _MAX_UNPACKED_PIXELS:
        raise NoPicture(f"{image.width} × {image.height} pixels are too many to unpack for a browser")
    if not isinstance(image, TiffImageFile) and not image.mode.startswith("I"):
        return image
    from experts.vision.preprocess import decode  # noqa: PLC0415 - OpenCV, which most pages do without

    file.seek(0)
    pixels = decode(file.read(), "image")
    return Image.fromarray(pixels[:, :, 0].copy() if image.mode.startswith(("I", "L", "1")) else pixels)


def _as_png(file: BinaryIO) -> bytes:
    try:
        with _opened(file) as image:
            png = io.BytesIO()
            image.save(png, "PNG", compress_level=1)
    except _UNREADABLE as error:
        raise NoPicture(f"it cannot be unpacked: {error}") from None
    return png.getvalue()
