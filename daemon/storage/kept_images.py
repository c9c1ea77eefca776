"""Images that stay after their verdict: copies of the journal's bytes under `images/`, made durable in groups."""

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TypeGuard

import structlog

from daemon.host.folders import make_folder
from daemon.records import JournalKey, Pixels
from daemon.storage import raw_pixels
from daemon.storage.database.values import CopyRequest, Kept
from daemon.storage.journal import JournalError

FILE_MODE = 0o640

_SIGNATURES = (
    (b"\xff\xd8\xff", ".jpg"),
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"BM", ".bmp"),
    (b"II*\x00", ".tif"),
    (b"MM\x00*", ".tif"),
)
_SUFFIXES = frozenset({*(suffix for _, suffix in _SIGNATURES), *raw_pixels.SUFFIXES, ".bin"})


class ImageFolder:
    """`folder/DAY/ID.jpg`, thousands of ids a sub-folder. Writing a copy again gives the same file."""

    def __init__(self, folder: Path, read: Callable[[JournalKey], bytes]) -> None:
        self._folder = folder
        self._read = read
        self._log = structlog.get_logger("images")

    def copy(self, images: Sequence[CopyRequest]) -> list[Kept]:
        """Copy `images` and make the copies durable together; OSError where the disk does not take or give them now.

        An image that the journal cannot give back is reported without a path, so that its row does not wait for ever.
        """
        kept: list[Kept] = []
        for image in images:
            try:
                payload = self._read(image.key)
            except JournalError as error:
                if _may_be_read_later(error.__cause__):
                    raise error.__cause__ from error
                self._log.error("image_lost", inspection_id=image.inspection_id, error=str(error))
                kept.append(Kept(image.inspection_id, None))
                continue
            kept.append(Kept(image.inspection_id, self._write(image, payload)))
        if any(image.image_path for image in kept):
            _sync_filesystem(self._folder)
        return kept

    def _write(self, image: CopyRequest, payload: bytes) -> str:
        header, suffix = _format(payload, image.pixels)
        part = self._folder / image.completed_at[:10] / f"{image.inspection_id // 1000:06d}"
        make_folder(part)
        path = part / f"{image.inspection_id}{suffix}"
        try:
            with path.open("wb") as file:
                os.fchmod(file.fileno(), FILE_MODE)
                file.write(header)
                file.write(payload)
        except OSError:
            with suppress(OSError):
                path.unlink()  # a part of an image takes room on a disk that has none
            raise
        return path.relative_to(self._folder.parent).as_posix()


def remove(folder: Path, image_paths: Sequence[str]) -> dict[str, str]:
    """Delete copies, and the folders that are empty then. What could not be deleted comes back with the reason.

    `folder` is `images/`; paths are as in `inspections.image_path`.
    """
    left: dict[str, str] = {}
    parts: set[Path] = set()
    for image_path in image_paths:
        parts_of_path = PurePosixPath(image_path).parts
        if parts_of_path[:1] != (folder.name,) or ".." in parts_of_path:
            continue  # a row that somebody wrote by hand
        path = folder.parent / image_path
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            left[image_path] = error.strerror or str(error)
        parts.add(path.parent)
    for part in (*parts, *{part.parent for part in parts}):
        if part != folder:
            with suppress(OSError):  # not empty
                part.rmdir()
    return left


def files_by_part(folder: Path) -> Iterator[list[tuple[int, str]]]:
    """All copies under `folder`, a sub-folder's at a time: inspection id and `image_path`. Other files are left out."""
    for part in sorted(folder.glob("????-??-??/*")):
        if not (part.name.isdigit() and part.is_dir()):
            continue
        found = [path for path in part.iterdir() if path.stem.isdigit() and path.suffix in _SUFFIXES]
        yield [(int(path.stem), path.relative_to(folder.parent).as_posix()) for path in found]


def _may_be_read_later(cause: BaseException | None) -> TypeGuard[OSError]:
    """No descriptor or memory to be had, no permission: the bytes are there all the same."""
    return isinstance(cause, OSError) and cause.errno not in {errno.ENOENT, errno.EIO}


def _format(payload: bytes, pixels: Pixels) -> tuple[bytes, str]:
    """What stands before the bytes in the file, and the suffix."""
    if pixels.shape is not None:
        return raw_pixels.header_of(pixels.shape)
    return b"", next((suffix for signature, suffix in _SIGNATURES if payload.startswith(signature)), ".bin")


def _sync_filesystem(folder: Path) -> None:
    """syncfs(2): one call makes a whole group of new files and their names durable; it reports write errors."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if libc.syncfs(fd) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(folder))
    finally:
        os.close(fd)
