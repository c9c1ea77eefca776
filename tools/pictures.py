"""Pictures in people's folders: which files are pictures, and their bytes as the daemon takes them.

The camera, training, imports and data sets read through here, so that no tool judges what the daemon refuses.
"""

import io
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

import cv2
import numpy as np
from PIL import ExifTags
from PIL import Image as Pillow

from daemon.units import count_text
from experts.errors import ImageError
from experts.vision.preprocess import MAX_PIXELS, Image, decode
from experts.vision.structure import check_size

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".tif", ".tiff", ".webp"})
#: Files and folders of operating systems and network drives, beside names that begin with a dot.
_SYSTEM_NAMES = frozenset(
    {"__macosx", "@eadir", "#recycle", "@recycle", "$recycle.bin", "system volume information", "thumbs.db"}
)
#: Pictures of these kinds are counted where they are left out.
_UNREAD = frozenset({".gif", ".heic", ".heif", ".avif", ".jp2", ".jxl", ".dng", ".cr2", ".nef", ".arw", ".psd"})
MARK_IGNORED = "it is ignored here as on the line; `coserve camera --upright` sends pictures turned by it"
HIDDEN = "hidden, or of a Mac, a network drive or Windows (._NAME, __MACOSX, @eaDir, Thumbs.db)"


#: A bit of the flags in an extended WebP's header.
_WEBP_ANIMATION = 2
#: The turn that makes a picture with this EXIF orientation upright.
_TURNS = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}


class FolderPictures(NamedTuple):
    """Sorted picture files, and the number of files left out by reason, as in `3 files left out: REASON`."""

    files: list[Path]
    left_out: Counter[str]


def is_hidden(path: PurePath) -> bool:
    """Return True if a part of `path`, which is relative to a person's folder, is no name that a person gave."""
    return any(part.startswith(".") or part.casefold() in _SYSTEM_NAMES for part in path.parts)


def find_pictures(folder: Path, depth: int | None = None) -> FolderPictures:
    """Return the pictures in `folder`: `depth` 1 directly, 2 in its subfolders, None anywhere below.

    Files that another program deletes meanwhile are passed over. OSError if a folder cannot be read.
    """
    files, left_out = list[Path](), Counter[str]()
    for path in _walk(folder, depth):
        suffix = path.suffix.lower()
        if is_hidden(path.relative_to(folder)):
            left_out[HIDDEN] += suffix in SUFFIXES or path.name.casefold() in _SYSTEM_NAMES
        elif suffix in SUFFIXES:
            files.append(path)
        elif suffix in _UNREAD:
            left_out[f"{suffix} is not read: save as PNG, JPEG, TIFF, BMP or WebP"] += 1
    return FolderPictures(sorted(files), +left_out)


def left_out_lines(left_out: Mapping[str, int]) -> list[str]:
    return [f"{count_text(count, 'file')} left out: {reason}" for reason, count in left_out.items()]


def orientation(content: bytes) -> int:
    """Return a file's EXIF orientation, 1 to 8, as far as it can be read; 1 is upright."""
    try:
        with Pillow.open(io.BytesIO(content), formats=("JPEG", "PNG", "TIFF", "WEBP")) as image:
            mark = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 - Pillow lets any error through; the decoder says what is wrong
        return 1
    return mark if mark in _TURNS else 1


def as_payload(content: bytes, *, upright: bool = False) -> bytes:
    """Return a file as the daemon takes it: WebP as PNG, with `upright` a marked picture turned, others as they are.

    Raises ImageError.
    """
    mark = orientation(content) if upright else 1
    if mark == 1:
        return _png(_decode_webp(content)) if _is_webp(content) else content
    return _png(np.asarray(Pillow.fromarray(read_pixels(content)).transpose(_TURNS[mark])))


def read_pixels(content: bytes) -> Image:
    """Return (H, W, 3) uint8 RGB of a file, as the daemon decodes it; orientation marks are ignored. ImageError."""
    return _decode_webp(content) if _is_webp(content) else decode(content, "image")


def _is_webp(content: bytes) -> bool:
    return content[:4] == b"RIFF" and content[8:12] == b"WEBP"


def _decode_webp(content: bytes) -> Image:
    if int.from_bytes(content[4:8], "little") + 8 > len(content):
        raise ImageError("the WebP is cut off")
    if content[12:16] == b"VP8X" and content[20] & _WEBP_ANIMATION:
        raise ImageError("the WebP is animated: save each picture as a file of its own")
    try:
        with Pillow.open(io.BytesIO(content), formats=("WEBP",)) as image:
            check_size(*image.size, MAX_PIXELS)
            return np.asarray(image.convert("RGB"))
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(f"the WebP is damaged or incomplete ({error})") from error


def _png(pixels: Image) -> bytes:
    return cv2.imencode(".png", pixels[:, :, ::-1])[1].tobytes()


def _walk(folder: Path, depth: int | None) -> Iterator[Path]:
    """Yield the regular files of that depth, and those that links to files lead to."""

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or error.filename == str(folder):
            raise error

    for place, folders, names in os.walk(folder, onerror=note, followlinks=depth is not None):
        level = len(Path(place).relative_to(folder).parts) + 1
        if depth is not None and level >= depth:
            folders.clear()
        for path in (Path(place, name) for name in names if depth in (None, level)):
            try:
                is_file = stat.S_ISREG(path.stat().st_mode)
            except OSError:  # gone, or a link to nothing or to itself
                is_file = path.is_symlink()  # reading it names it
            if is_file:
                yield path
