"""Pictures in people's folders: which files are pictures, and their bytes as the daemon takes them.

The camera, training, imports and data sets read through here, so that no tool judges what the daemon refuses.
"""

import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from errno import ENOENT
from pathlib import Path, PurePath
from typing import NamedTuple

import cv2
import numpy as np
from PIL import ExifTags, ImageOps
from PIL import Image as Pillow

from daemon.units import count_text
from experts.errors import ImageError
from experts.vision.preprocess import Image, decode, decode_opencv

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".tif", ".tiff", ".webp"})
#: Files and folders of operating systems and network drives, beside names that begin with a dot.
_SYSTEM_NAMES = frozenset(
    {"__macosx", "@eadir", "#recycle", "@recycle", "$recycle.bin", "system volume information", "thumbs.db"}
)
#: Pictures of these kinds are counted where they are left out.
_UNREAD = frozenset({".gif", ".heic", ".heif", ".avif", ".jp2", ".jxl", ".dng", ".cr2", ".nef", ".arw", ".psd"})
MARK_IGNORED = "it is ignored here as on the line; `coserve camera --upright` sends pictures turned by it"
HIDDEN = "hidden, or of a Mac, a network drive or Windows (._NAME, __MACOSX, @eaDir, Thumbs.db)"


class FolderPictures(NamedTuple):
    """Sorted picture files, and the number of files left out by reason, as in `3 files left out: REASON`."""

    files: list[Path]
    left_out: Counter[str]


def is_hidden(path: PurePath) -> bool:
    """Return True if a program, not a person, named a part of `path`, which is relative to a person's folder."""
    return any(part.startswith(".") or part.casefold() in _SYSTEM_NAMES for part in path.parts)


def find_pictures(folder: Path, depth: int | None = None) -> FolderPictures:
    """Return the pictures in `folder`: `depth` 1 directly, 2 in its subfolders, None anywhere below.

    Files that another program deletes meanwhile are skipped; subfolders that cannot be read (lost+found) are left
    out. OSError if `folder` cannot be read.
    """
    files, left_out = list[Path](), Counter[str]()
    for path in _walk(folder, depth, left_out):
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
    return mark if mark in range(1, 9) else 1


def as_payload(content: bytes, *, upright: bool = False) -> bytes:
    """Return a file as the daemon takes it: WebP as PNG, with `upright` a marked picture turned, others as they are.

    Raises ImageError.
    """
    mark = orientation(content) if upright else 1
    is_webp = content[:4] == b"RIFF" and content[8:12] == b"WEBP"
    if is_webp and content[12:16] == b"VP8X" and int.from_bytes(content[20:21]) & 2:
        raise ImageError("the WebP is animated: send each picture as a file of its own")
    if mark == 1 and not is_webp:
        return content
    image = Pillow.fromarray(decode_opencv(content) if is_webp else decode(content, "image"))
    image.getexif()[ExifTags.Base.Orientation] = mark
    turned = np.asarray(ImageOps.exif_transpose(image))
    return cv2.imencode(".png", turned[:, :, ::-1])[1].tobytes()


def read_pixels(content: bytes) -> Image:
    """Return (H, W, 3) uint8 RGB of a file, as the daemon decodes it; orientation marks are ignored. ImageError."""
    return decode(as_payload(content), "image")


def _walk(folder: Path, depth: int | None, left_out: Counter[str]) -> Iterator[Path]:
    """Yield files of that depth, and links to files; also links to nothing, which are named when they are read."""

    def note(error: OSError) -> None:
        if error.filename == str(folder):
            raise error
        left_out[f"the folder {error.filename} cannot be read ({error.strerror})"] += error.errno != ENOENT

    for place, folders, names in os.walk(folder, onerror=note, followlinks=depth is not None):
        level = len(Path(place).relative_to(folder).parts) + 1
        if depth is not None and level >= depth:
            folders.clear()
        paths = (Path(place, name) for name in names if depth in (None, level))
        yield from (path for path in paths if path.is_file() or not path.exists())
