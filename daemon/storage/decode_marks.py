"""Which images are being decoded just now, in a few bytes that outlive the process.

Each executor notes the journal key of the image in its decoder: a copy into shared memory, no system call. A clean stop
clears all of it. Whatever a start still finds was in a decoder when the daemon died, and is looked at before it may
enter one again (suspect_images.py): an image that kills its decoder costs one restart, never a loop of them.
"""

import mmap
import os
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import structlog

from daemon.records import JournalKey
from daemon.storage.journal import FILE_MODE

_MAGIC = b"CSMARKS1"
_RECORD = struct.Struct("<QQQQ")  # segment, offset and length of the key, then how often the daemon died with it
_EMPTY = bytes(_RECORD.size)
#: Records of images being decoded, then as many of images that the daemon died with before.
_PLACES = 128
_PAST = _PLACES * _RECORD.size
_BYTES = mmap.PAGESIZE * -(-(2 * _PAST + len(_MAGIC)) // mmap.PAGESIZE)


@dataclass(frozen=True, slots=True)
class Suspect:
    """An image that was in a decoder when the daemon died, for the `deaths`-th time."""

    key: JournalKey
    deaths: int


class DecodeMarks:
    """The marks in `path`. Where the file cannot be had the line runs without, and says so."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = structlog.get_logger("marks")
        self._taken = 0
        try:
            self._memory: mmap.mmap | None = _map(path)
        except OSError as error:
            self._memory = None
            self._log.error("marks_unavailable", file=str(path), error=str(error))
        self.suspects = self._read()
        self._write_past(self.suspects)

    def place(self) -> Callable[[JournalKey | None], None]:
        """Where one executor marks the image in its decoder; None: there is none."""
        memory, at = self._memory, self._taken * _RECORD.size
        self._taken += 1
        if memory is None or self._taken > _PLACES:
            return lambda _key: None

        def mark(key: JournalKey | None) -> None:
            if memory.closed:
                return  # a thread that hung has come back after the stop
            memory[at : at + _RECORD.size] = (
                _EMPTY if key is None else _RECORD.pack(key.segment, key.offset, key.length, 1)
            )

        return mark

    def keep(self, keys: Collection[JournalKey]) -> list[Suspect]:
        """Forget all suspects but those in `keys` (images that still wait for a verdict), and return these."""
        kept = [suspect for suspect in self.suspects if suspect.key in keys]
        self._write_past(kept)
        return kept

    def close(self, *, clean: bool) -> None:
        """`clean`: every decoder has ended as it should."""
        if self._memory is None:
            return
        if clean:
            self._memory[:_PAST] = bytes(_PAST)
            self._write_past([])
        self._memory.close()

    def _read(self) -> list[Suspect]:
        """What the last run left: images in its decoders, and those that it had found itself."""
        if self._memory is None:
            return []
        records = list(_RECORD.iter_unpack(self._memory[: 2 * _PAST]))
        deaths = {JournalKey(*record[:3]): record[3] for record in records[_PLACES:] if record[3]}
        for segment, offset, length, is_marked in records[:_PLACES]:
            if is_marked:
                key = JournalKey(segment, offset, length)
                deaths[key] = deaths.get(key, 0) + 1
        return [Suspect(key, count) for key, count in deaths.items()]

    def _write_past(self, suspects: Collection[Suspect]) -> None:
        if self._memory is None:
            return
        past = [
            _RECORD.pack(one.key.segment, one.key.offset, one.key.length, one.deaths)
            for one in list(suspects)[:_PLACES]
        ]
        self._memory[: 2 * _PAST] = bytes(_PAST) + b"".join(past).ljust(_PAST, b"\0")


def _map(path: Path) -> mmap.mmap:
    """The file in memory, all its bytes on the disk: a write into a hole of a full disk would end the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        if os.fstat(fd).st_size != _BYTES or os.pread(fd, len(_MAGIC), _BYTES - len(_MAGIC)) != _MAGIC:
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, _BYTES)
            os.pwrite(fd, _MAGIC, _BYTES - len(_MAGIC))
        return mmap.mmap(fd, _BYTES)
    finally:
        os.close(fd)
