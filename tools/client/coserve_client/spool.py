"""The folder in which a camera's images wait while the daemon is away: one file for each image, with a checksum.

Names are numbers that count up, so that the order of the images needs no clock. A damaged entry is moved aside under
its name, never dropped. A spool belongs to one process at a time, and its images to one source: an id identifies an
image only together with its source.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path

from coserve_client.publisher import PublishError

_MAGIC = b"COSERVE-SPOOL-1\n"
_LENGTH = struct.Struct(">I")
_OVERHEAD_BYTES = len(_MAGIC) + 32 + _LENGTH.size
_ENTRY = re.compile(r"([0-9]{12,})\.image")


class SpoolError(PublishError):
    """A spool that cannot be used: another process holds it, or it belongs to another source."""


class SpoolEntryError(Exception):
    """A damaged spool entry."""


class Spool:
    """The images of one camera on disk, for one thread at a time.

    `waiting`: number and bytes of the entries of an earlier process, oldest first.
    """

    def __init__(self, folder: Path, source: str) -> None:
        """Make or open the spool; SpoolError if it is in use or another source's, OSError if the disk refuses."""
        self.folder = folder
        self._aside = folder / "set_aside"
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._lock = _locked(folder / "lock")
        try:
            numbers = sorted(self._numbers(folder))
            self._check_source(numbers, source)
            self.waiting = [(number, self._path(number).stat().st_size) for number in numbers]
            self.next_number = max([*numbers, *self._numbers(self._aside)], default=0) + 1
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the spool for another process."""
        if not self._lock.closed:
            with contextlib.suppress(OSError):
                self._lock.truncate(0)
            self._lock.close()

    @staticmethod
    def size_of(header: bytes, payload: bytes) -> int:
        """Return the bytes that an entry takes in the spool."""
        return _OVERHEAD_BYTES + len(header) + len(payload)

    def write(self, entries: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Make each (number, header, payload) durable, all or none of them; OSError if the disk refuses."""
        written: list[Path] = []
        try:
            for number, header, payload in entries:
                path = self._path(number)
                written.append(path)
                with path.open("wb") as file:
                    file.writelines((_head(header, payload), header, payload))
                    file.flush()
                    os.fsync(file.fileno())
            _sync_folder(self.folder)
        except OSError:
            for path in written:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise

    def read(self, number: int) -> tuple[str, bytes, bytes]:
        """Return an entry's image id, header and payload; SpoolEntryError if it is damaged."""
        try:
            content = self._path(number).read_bytes()
        except OSError as error:
            raise SpoolEntryError(f"it cannot be read: {error.strerror or error}") from None
        if not content.startswith(_MAGIC) or len(content) < _OVERHEAD_BYTES:
            raise SpoolEntryError("it is cut off, or not an entry of a spool")
        (length,) = _LENGTH.unpack_from(content, _OVERHEAD_BYTES - _LENGTH.size)
        header, payload = content[_OVERHEAD_BYTES:][:length], content[_OVERHEAD_BYTES + length :]
        if content[:_OVERHEAD_BYTES] != _head(header, payload):
            raise SpoolEntryError("it is damaged: its checksum differs")
        return json.loads(header)["id"], header, payload

    def remove(self, number: int) -> None:
        """Delete an entry whose image has its answer. After a power cut it may be back, and be sent as a duplicate."""
        with contextlib.suppress(FileNotFoundError):
            self._path(number).unlink()

    def set_aside(self, number: int) -> Path:
        """Move a damaged entry into `set_aside/`, for a person to look at; OSError if that fails."""
        self._aside.mkdir(mode=0o750, exist_ok=True)
        return self._path(number).rename(self._aside / self._path(number).name)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:012d}.image"

    @staticmethod
    def _numbers(folder: Path) -> list[int]:
        names = [entry.name for entry in os.scandir(folder)] if folder.is_dir() else []
        return [int(match[1]) for name in names if (match := _ENTRY.fullmatch(name))]

    def _check_source(self, numbers: list[int], source: str) -> None:
        """Raise SpoolError if the oldest readable entry names another source; all entries have the same."""
        owner = next((name for number in numbers if (name := self._source_of(number))), source)
        if owner != source:
            raise SpoolError(
                f"the spool {self.folder} belongs to source {owner!r}, not to {source!r}: its images can only be sent "
                f"under that name; give each source its own folder"
            )

    def _source_of(self, number: int) -> str | None:
        with contextlib.suppress(SpoolEntryError):
            return json.loads(self.read(number)[1])["source"]
        return None


def _locked(path: Path) -> io.FileIO:
    """Open a file, lock it until this process ends, and write the process number into it."""
    lock = path.open("a+b", buffering=0)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().decode("ascii", "replace").strip() or "unknown"
        lock.close()
        raise SpoolError(
            f"the spool {path.parent} is in use by process {owner}: stop it first, or name another folder"
        ) from None
    with contextlib.suppress(OSError):  # a full disk: the lock holds without the number
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())
    return lock


def _head(header: bytes, payload: bytes) -> bytes:
    length = _LENGTH.pack(len(header))
    digest = hashlib.sha256(length)
    digest.update(header)
    digest.update(payload)
    return _MAGIC + digest.digest() + length


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
