"""Pictures in people's folders: which files are pictures, and their bytes as the daemon takes them.

The camera, training, imports and data sets read through here, so that no tool judges what the daemon refuses.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterator
from mimetypes import guess_type
from pathlib import Path, PurePath
from typing import NamedTuple

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".tif", ".tiff", ".webp"})
#: Files and folders of operating systems and network drives, beside names that begin with a dot.
_SYSTEM_NAMES = frozenset(
    {"__macosx", "@eadir", "#recycle", "@recycle", "$recycle.bin", "system volume information", "thumbs.db"}
)
HIDDEN = "hidden, or of a Mac, a network drive or Windows (._NAME, __MACOSX, @eaDir, Thumbs.db)"


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
        elif (guess_type(path.name)[0] or "").startswith("image/"):
            left_out[f"{suffix} is not read: save as PNG, JPEG, TIFF, BMP or WebP"] += 1
    return FolderPictures(sorted(files), +left_out)


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
