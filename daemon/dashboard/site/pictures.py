"""Pictures of images that were kept. Asked for by inspection, never by a file's name.

The path comes from the database and is still not trusted: every part of it is opened below the images folder, without
following a link, so that neither a row that somebody changed nor a link in the folder leads anywhere else.
"""

import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

#: Widths, in pixels, in which a picture may be asked for: for lists and cards, and for a desk's screen.
WIDTHS = (480, 1600)
_MEDIA_TYPES = {".jpg": "image/jpeg", ".png": "image/png", ".bmp": "image/bmp"}
#: What browsers do not show: they get it as PNG, where it is small enough to be unpacked for them.
_CONVERTED = (".tif", ".pgm", ".ppm")
#: What intake takes; Pillow knows dozens more, and starts programs for some.
_FORMATS = ("JPEG", "PNG", "BMP", "TIFF", "PPM")
_ORIENTATION = 274
#: Pillow turns a TIFF by its orientation mark, which experts and boxes know nothing of: what turns it back.
_TURNED_BACK = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
_SIDEWAYS = tuple(_TURNED_BACK[mark] for mark in (5, 6, 7, 8))
#: What is unpacked here at all, by the header and before a pixel is read: four bytes each.
_UNPACKED_PIXELS = 25_000_000
_CHUNK_BYTES = 256 * 1024
_QUALITY = 90


class NoPicture(Exception):  # noqa: N818
    """There is nothing to show; the text says why."""


@dataclass(frozen=True, slots=True)
class Size:
    """In stored pixels, before any EXIF turn: what boxes are measured in."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Picture:
    """An open picture; `chunks` gives its bytes once, and closes it."""

    file: BinaryIO
    length_bytes: int
    media_type: str
    etag: str

    def chunks(self) -> Iterator[bytes]:
        with self.file as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk


@dataclass(frozen=True, slots=True)
class Stored:
    """A kept picture that is open and not read yet. It is closed by `close`, or with what `picture` gives."""

    file: BinaryIO
    suffix: str
    length_bytes: int
    _mark: str

    def etag(self, width: int = 0) -> str:
        """Another for each file, each change of it and each width."""
        return f'"{self._mark}-{width}"' if width else f'"{self._mark}"'

    @property
    def is_converted(self) -> bool:
        """Whether it is unpacked even when it is shown whole."""
        return self.suffix in _CONVERTED

    def close(self) -> None:
        self.file.close()

    def picture(self, width: int = 0) -> Picture:
        """The picture, `width` pixels wide where it is wider; NoPicture where browsers would not show it.

        One that cannot be made smaller, too large to be unpacked here or damaged, comes whole.
        """
        smaller = _smaller(self.file, width) if width else None
        if smaller is not None:
            self.close()
            return Picture(io.BytesIO(smaller), len(smaller), "image/jpeg", self.etag(width))
        self.file.seek(0)
        if self.suffix in _MEDIA_TYPES:
            return Picture(self.file, self.length_bytes, _MEDIA_TYPES[self.suffix], self.etag(width))
        with self.file as file:
            png = _as_png(file)
        return Picture(io.BytesIO(png), len(png), "image/png", self.etag(width))


class Pictures:
    """The images folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._size = lru_cache(maxsize=4096)(self._measured)

    def open(self, image_path: str) -> Stored:
        """What lies at `inspections.image_path`; NoPicture where it may not be shown, or is not there any more."""
        file, facts = self._open(image_path)
        mark = f"{facts.st_mtime_ns:x}-{facts.st_size:x}"
        return Stored(file, PurePosixPath(image_path).suffix, facts.st_size, mark)

    def size(self, image_path: str | None) -> Size | None:
        """The size that the picture's own header says; None where there is none to show."""
        return self._size(image_path) if image_path else None

    def _measured(self, image_path: str) -> Size | None:
        try:
            file, _ = self._open(image_path)
            with file, Image.open(file, formats=_FORMATS) as image:
                return _stored_size(image)
        except (NoPicture, OSError, ValueError, Image.DecompressionBombError):
            return None

    def _open(self, image_path: str) -> tuple[BinaryIO, os.stat_result]:
        """The path is `images/DAY/THOUSANDS/ID.jpg`: its first part is the images folder's own name."""
        parts = PurePosixPath(image_path).parts
        if len(parts) < 2 or parts[0] != self._folder.name or any(part in ("", "..", "/") for part in parts):
            raise NoPicture("its path leads out of the images folder")
        if PurePosixPath(image_path).suffix not in (*_MEDIA_TYPES, *_CONVERTED):
            raise NoPicture("this image's format is one that browsers do not show")
        folders = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            at = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for part in parts[1:-1]:
                    below = os.open(part, folders, dir_fd=at)
                    os.close(at)
                    at = below
                # Without O_NONBLOCK a pipe that lies there would hold us up.
                fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
            finally:
                os.close(at)
        except FileNotFoundError:
            raise NoPicture("the picture was pruned") from None
        except OSError as error:
            raise NoPicture(f"the picture cannot be read: {error.strerror}") from None
        except ValueError:
            raise NoPicture("its path leads out of the images folder") from None
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            os.close(fd)
            raise NoPicture("there is no ordinary file in its place")
        return os.fdopen(fd, "rb"), facts


def _smaller(file: BinaryIO, width: int) -> bytes | None:
    """A JPEG of that width; None where the picture is not wider, or is none that may be unpacked here."""
    try:
        with Image.open(file, formats=_FORMATS) as image:
            stored = _stored_size(image)
            if stored.width <= width or stored.width * stored.height > _UNPACKED_PIXELS:
                return None
            size = (width, max(1, round(stored.height * width / stored.width)))
            image.draft(None, (2 * size[0], 2 * size[1]))  # a JPEG is unpacked no larger than needed
            shown = _eight_bits(_as_stored(image)).resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)
            jpeg = io.BytesIO()
            shown.save(jpeg, "JPEG", quality=_QUALITY, subsampling=0)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return jpeg.getvalue()


def _turn_back(image: Image.Image) -> Image.Transpose | None:
    """Before its pixels are read."""
    mark: Any = image.tag_v2.get(_ORIENTATION) if isinstance(image, TiffImageFile) else None
    return _TURNED_BACK.get(mark)


def _stored_size(image: Image.Image) -> Size:
    """Of an image whose pixels are not read yet: Pillow gives a TIFF's as turned."""
    width, height = image.size
    return Size(height, width) if _turn_back(image) in _SIDEWAYS else Size(width, height)


def _as_stored(image: Image.Image) -> Image.Image:
    back = _turn_back(image)
    return image if back is None else image.transpose(back)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey or RGB, as experts see it: alpha dropped, 16 bits cut to their high byte."""
    if image.mode.startswith("I"):
        return image.point(lambda value: value / 256).convert("L")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _as_png(file: BinaryIO) -> bytes:
    try:
        with Image.open(file, formats=_FORMATS) as image:
            if image.width * image.height > _UNPACKED_PIXELS:
                raise NoPicture(f"{image.width} × {image.height} pixels are too many to unpack for a browser")
            png = io.BytesIO()
            _as_stored(image).save(png, "PNG", compress_level=1)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise NoPicture(f"it cannot be unpacked: {error}") from None
    return png.getvalue()
