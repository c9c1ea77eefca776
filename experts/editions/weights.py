"""Weights by their sha256: `weights/ab/ab12….safetensors` beside the catalog, whole, never changed."""

import fcntl
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from experts.catalog import is_digest
from experts.durable import make_folders, replacing, sync
from experts.weights import describe_os_error, file_sha256

_FOLDER = "weights"
_SUFFIX = ".safetensors"
_CHUNK_BYTES = 4 << 20
#: linux/fs.h: share a file's blocks with another one (Btrfs, XFS).
_FICLONE = 0x40049409


class WeightsStore:
    """The weights beside one catalog; the catalog's readers may read them."""

    def __init__(self, catalog: Path) -> None:
        self._catalog = catalog
        self.folder = catalog.parent / _FOLDER

    @property
    def mode(self) -> int:
        """Return the permissions of a file that is never written again."""
        return (self._catalog.stat().st_mode if self._catalog.exists() else 0o644) & 0o444

    def place(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / f"{sha256}{_SUFFIX}"

    def has(self, sha256: str) -> bool:
        return self.place(sha256).is_file()

    def is_whole(self, sha256: str) -> bool:
        return self.has(sha256) and file_sha256(self.place(sha256)) == sha256

    def enter(self, files: Mapping[str, Path]) -> dict[str, str]:
        """Take in the files that are not here yet, by their sha256, durably; return those that cannot be, and why.

        Raises OSError if the disk cannot take them.
        """
        return {
            sha256: problem
            for sha256, file in files.items()
            if not self.has(sha256) and (problem := self._enter(sha256, file))
        }

    def remove(self, sha256: str) -> int:
        """Delete weights that no edition needs, or that are damaged; return the bytes freed."""
        place = self.place(sha256)
        size_bytes = place.stat().st_size
        place.unlink()
        sync(place.parent)
        return size_bytes

    def all(self) -> dict[str, int]:
        files = self.folder.glob(f"??/*{_SUFFIX}")
        return {file.stem: file.stat().st_size for file in files if is_digest(file.stem)}

    def _enter(self, sha256: str, file: Path) -> str | None:
        place = self.place(sha256)
        make_folders(place.parent, self._catalog.parent)
        try:
            source = file.open("rb")
        except OSError as error:
            return f"{file}: {describe_os_error(error)}"
        try:
            with source, replacing(place, self.mode, place.parent) as part:
                _copy(source, part, sha256)
        except _WrongBytesError as error:
            return f"{file}: its sha256 is {error}…, its entry says {sha256[:12]}…"
        return None


class _WrongBytesError(Exception):
    """The file holds other bytes than those of its name; the text is the beginning of their sha256."""


def _copy(source: BinaryIO, part: Path, sha256: str) -> None:
    """Clone a file where the file system can, else copy it. Raises _WrongBytesError."""
    with part.open("wb") as target:
        try:
            fcntl.ioctl(target, _FICLONE, source.fileno())
        except OSError:  # not on this file system, or from another one
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
    actual = file_sha256(part)
    if actual != sha256:
        raise _WrongBytesError(actual[:12])
