"""Weights files that a worker has received, by sha256: complete and verified, or not there at all."""

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from daemon.units import size_text
from experts.catalog import is_digest
from experts.weights import file_sha256

#: A use is noted at most this often: a pool checks a file's sha256 again whenever its times have changed.
_NOTE_USE_EVERY_S = 3600.0


class CacheError(Exception):
    """A weights file was refused; the text says which and why. `is_altered`: its bytes do not match its digest."""

    def __init__(self, message: str, *, is_altered: bool = False) -> None:
        self.is_altered = is_altered
        super().__init__(message)


class ExpertCache:
    """A folder of at most `max_bytes`; the least recently used files are deleted first. For any thread and process.

    It survives restarts: the modification time of a file is roughly when any process last used it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        #: When this process last used each digest.
        self._used_s: dict[str, float] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Return the digests whose files are missing; the others count as used now."""
        missing: list[str] = []
        for digest in dict.fromkeys(digests):
            path, now_s = self._path(digest), time.time()
            try:
                if abs(now_s - path.stat().st_mtime) > _NOTE_USE_EVERY_S:
                    os.utime(path)
                self._used_s[digest] = now_s
            except FileNotFoundError:
                missing.append(digest)
        return missing

    def take(self, digest: str, size: int, offset: int, chunk: bytes) -> None:
        """Take the next part of a file of `size` bytes; after the last, verify it and put it in its place.

        Raises CacheError if its bytes are not those of `digest`, or the cache is too small for it.
        """
        path = self._path(digest)
        part = path.with_name(f"{digest}.{os.getpid()}.part")
        if size > self._max_bytes:
            limit = size_text(self._max_bytes)
            raise CacheError(f"{digest[:12]} needs {size_text(size)}, and the cache holds {limit}: raise --cache-size")
        with self._lock:
            if offset == 0:
                part.unlink(missing_ok=True)
                self._free_space(size)
            with part.open("ab") as file:
                is_next = file.tell() == offset and offset + len(chunk) <= size
                if is_next:
                    file.write(chunk)
            if is_next and offset + len(chunk) < size:
                return
            arrived = file_sha256(part) if is_next else ""
            if arrived == digest:
                part.replace(path)
                return
            part.unlink()
            if not is_next:
                raise CacheError(f"{digest[:12]} came in the wrong order")
            message = f"the bytes that arrived are {arrived[:12]}, not {digest[:12]}: restore the weights file"
            raise CacheError(message, is_altered=True)

    def drop_altered(self, digests: Iterable[str]) -> list[str]:
        """Delete files whose bytes no longer match their digest (power cut, bad disk); return the missing digests."""
        digests = list(dict.fromkeys(digests))
        for digest in digests:
            with suppress(OSError):
                if file_sha256(self._path(digest)) != digest:
                    self._path(digest).unlink()
        return self.missing(digests)

    def _path(self, digest: str) -> Path:
        if not is_digest(digest):
            raise CacheError(f"{digest[:80]!r} is not a sha256")
        return self.folder / digest

    def _free_space(self, size: int) -> None:
        """Delete files, the least recently used first, and partial files of processes that have died."""
        states: list[tuple[Path, os.stat_result]] = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process has put it in its place, or deleted it
                if path.is_file() and not _is_being_written(path):
                    states.append((path, path.stat()))
        states.sort(key=lambda each: (each[0].suffix != ".part", self._last_used_s(*each)))
        used = sum(state.st_size for _, state in states)
        for path, state in states:
            if used + size <= self._max_bytes and path.suffix != ".part":
                return
            path.unlink(missing_ok=True)
            used -= state.st_size

    def _last_used_s(self, path: Path, state: os.stat_result) -> float:
        return max(state.st_mtime, self._used_s.get(path.name, 0.0))


def _is_being_written(path: Path) -> bool:
    """Return True for a partial file whose process still runs."""
    return path.suffix == ".part" and Path("/proc", path.suffixes[0][1:]).exists()
