"""Weights by their sha256: `weights/ab/ab12….safetensors` beside the catalog, whole, never changed."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

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

    def lacking_bytes(self, files: Mapping[str, Path]) -> int:
        """Return how much `enter` would copy at most."""
        return sum(file.stat().st_size for sha256, file in files.items() if not self.has(sha256) and file.is_file())

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._catalog.parent).free

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
        """Return the size of each file, in bytes."""
        files = self.folder.glob(f"??/*{_SUFFIX}")
        return {file.stem: file.stat().st_size for file in files if is_digest(file.stem)}

    def _enter(self, sha256: str, file: Path) -> str | None:
        place = self.place(sha256)
        make_folders(place.parent, self._catalog.parent)
        try:
            source = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return f"{file}: {describe_os_error(error)}"
        try:
            with replacing(place, self.mode, place.parent) as part:
                _copy(source, part, sha256)
        except _WrongBytesError as error:
            return f"{file}: its sha256 is {error}…, its entry says {sha256[:12]}…"
        finally:
            os.close(source)
        return None


class _WrongBytesError(Exception):
    """The file holds other bytes than those of its name; the text is the beginning of their sha256."""


def _copy(source: int, part: Path, sha256: str) -> None:
    """Clone a file where the file system can, else copy it. Raises _WrongBytesError."""
    target = os.open(part, os.O_WRONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(target, _FICLONE, source)
        actual = file_sha256(part)
    except OSError:
        actual = _copied(source, target)
    finally:
        os.close(target)
    if actual != sha256:
        raise _WrongBytesError(actual[:12])


def _copied(source: int, target: int) -> str:
    digest = hashlib.sha256()
    with os.fdopen(target, "wb", closefd=False) as writer:
        while piece := os.read(source, _CHUNK_BYTES):
            digest.update(piece)
            writer.write(piece)
    return digest.hexdigest()
