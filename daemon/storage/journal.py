"""Accepted image bytes on disk: append-only segments of checksummed records, and the thread that appends to them.

A record is a 16-byte header (magic, payload length, CRC-32 of length and payload) and the payload. A group costs one
`fdatasync`; only then are the rows committed that point at it. So no row points into a torn tail: opening scans and
truncates nothing, and appending goes on in a new segment.

Groups are fair by source. While one is synced the writer commits the rows of the one before. A group that cannot be
written is handed on in its turn, so that every image is answered once (docs/architecture.md).
"""

import errno
import os
import queue
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from daemon.host.folders import make_folder
from daemon.records import Duplicate, Image, JournalKey, Refused, WriteFailed
from daemon.storage.disk_space import DiskSpace, LowSpaceError
from daemon.wire.fair_queue import FairQueue
from experts.durable import sync

if TYPE_CHECKING:
    from daemon.storage.database.store import Store

FILE_MODE = 0o640

_HEADER = struct.Struct("<4sQI")
_MAGIC = b"CSJ1"
_LENGTH = struct.Struct("<Q")
_NAME = re.compile(r"segment-(\d{8,})\.journal")
#: More bytes at once, and `crc32` would release the interpreter lock: for 0.02 ms of work, the thread would wait much
#: longer to get it back from the intake.
_CRC_BYTES = 5 * 1024
#: writev(2) takes at most IOV_MAX buffers a call: 1024 on Linux.
_BUFFERS_PER_WRITE = 1024
#: The bounds of a group, so that no image waits long behind another sender's; a larger image makes a group of its own.
GROUP_IMAGES = 32
GROUP_BYTES = 2 * 2**20
#: A smaller group begins this long after the previous one, so that more images share a sync and a transaction.
_GROUP_EVERY_S = 0.010
#: Images come in bursts from the intake: a group waits for the rest of one.
_BURST_S = 0.002
#: It looks for more images meanwhile, because waiting at the queue would wake its thread for each.
_LOOK_EVERY_S = 0.005
#: Groups between the journal and the database: one that is synced, one whose rows are committed.
_GROUPS_AHEAD = 2


def segment_file(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:08d}.journal"


class JournalError(Exception):
    """Bytes that cannot be written, or were altered since: `segment`, `offset` and `reason`."""

    def __init__(self, segment: int, offset: int, reason: str) -> None:
        self.segment = segment
        self.offset = offset
        self.reason = reason
        super().__init__(f"journal segment {segment}, offset {offset}: {reason}")


class _Descriptor:
    """An open segment for reading; it closes with its last user, so that no reader meets another file."""

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        fd = getattr(self, "fd", None)
        if fd is not None:
            os.close(fd)


class Journal:
    """The segments: append from one thread, drop from one, read from any. A segment ends at `segment_bytes`."""

    def __init__(self, folder: Path, segment_bytes: int = 256 * 2**20) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._readers: dict[int, _Descriptor] = {}
        self._lock = threading.Lock()
        self._writing: int | None = None
        self._end = 0
        self._active_path = folder
        make_folder(folder)
        self._numbers = {int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
        self._active = max(self._numbers, default=0)

    @property
    def segments(self) -> tuple[int, ...]:
        return tuple(sorted(self._numbers))

    @property
    def frontier(self) -> int:
        """Segments below this number take no more records."""
        return self._active if self._writing is not None else self._active + 1

    def begin_after(self, segment: int) -> None:
        """Number new segments above `segment`: in a folder that was emptied, no old key may point at new bytes."""
        self._active = max(self._active, segment)

    def append(self, payloads: Sequence[bytes]) -> list[JournalKey]:
        """Make `payloads` durable with one `fdatasync` and return their keys; JournalError if none of them is.

        After a failure the segment takes no more records: the state after a failed sync is unknown, and a second sync
        may succeed without having written anything.
        """
        writing = self._segment_with_room()
        keys: list[JournalKey] = []
        buffers: list[bytes] = []
        end = self._end
        for payload in payloads:
            buffers += (_header(payload), payload)
            keys.append(JournalKey(self._active, end + _HEADER.size, len(payload)))
            end += _HEADER.size + len(payload)
        try:
            _write_all(writing, buffers, self._end)
            os.fdatasync(writing)
            self._check_place(writing)
        except OSError as error:
            failed_at = self._end
            self._retire()
            raise JournalError(self._active, failed_at, f"cannot write: {error.strerror or error}") from error
        self._end = end
        return keys

    def read(self, key: JournalKey) -> bytes:
        """Return the payload at `key`; JournalError if the segment is gone, cut or altered. Any thread."""
        start = key.offset - _HEADER.size
        try:
            descriptor = self._reader(key.segment)
            data = os.pread(descriptor.fd, _HEADER.size + key.length, start)
        except OSError as error:
            raise JournalError(key.segment, start, f"cannot read: {error.strerror or error}") from error
        payload = data[_HEADER.size :]
        if len(payload) != key.length:
            raise JournalError(key.segment, start, f"cut: {len(data)} of {_HEADER.size + key.length} bytes are there")
        if data[: _HEADER.size] != _header(payload):
            raise JournalError(key.segment, start, "the checksum does not match: the bytes were altered")
        return payload

    def drop_segments(self, keep: Collection[int], below: int | None = None) -> list[int]:
        """Delete the segments below `below`, a past `frontier` (default: the present one), except those in `keep`.

        Return their numbers; raise OSError at the end if one could not be deleted. One thread may call this while
        another appends.
        """
        dropped: list[int] = []
        open_files: list[_Descriptor] = []
        failed: OSError | None = None
        limit = self.frontier if below is None else below
        for number in self.segments:
            if number in keep or number >= limit:
                continue
            try:
                with suppress(FileNotFoundError):
                    open_files.append(self._reader(number))
                self._delete(number)
            except OSError as error:
                failed = error
            else:
                dropped.append(number)
        # A file's blocks are freed with its last descriptor: that takes a tenth of a second, and images would wait.
        if open_files:
            with suppress(RuntimeError):  # no more threads: they are freed here
                threading.Thread(target=open_files.clear, name="journal-free").start()
        if failed is not None:
            raise failed
        return dropped

    def close(self) -> None:
        """Close the files; every appended record is durable already."""
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None
        with self._lock:
            self._readers.clear()

    def _delete(self, number: int) -> None:
        with self._lock:
            self._readers.pop(number, None)
        segment_file(self._folder, number).unlink(missing_ok=True)
        self._numbers.discard(number)

    def _reader(self, number: int) -> _Descriptor:
        with self._lock:
            reader = self._readers.get(number)
            if reader is None:
                reader = self._readers[number] = _Descriptor(segment_file(self._folder, number))
            return reader

    def _segment_with_room(self) -> int:
        """Return the file to write to. The name of a new one is durable before the first record in it can be."""
        if self._writing is not None:
            if self._end < self._segment_bytes:
                return self._writing
            fd, self._writing = self._writing, None
            with suppress(OSError):  # its records are durable; a second close might hit another file
                os.close(fd)
        number = self._active + 1
        path = segment_file(self._folder, number)
        fd = None
        try:
            if not self._folder.exists():
                make_folder(self._folder)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            os.fchmod(fd, FILE_MODE)
            sync(self._folder)
            self._reader(number)  # opened now, it can be read even if its name is removed
        except OSError as error:
            if fd is not None:
                os.close(fd)
                with suppress(OSError):
                    path.unlink()
            if os.path.lexists(path):
                self._active = number  # a file that is there keeps its number, and the next group gets another
            raise JournalError(number, 0, f"cannot begin a segment: {error.strerror or error}") from error
        self._writing, self._active, self._end = fd, number, 0
        self._active_path = path
        self._numbers.add(number)
        return fd

    def _check_place(self, writing: int) -> None:
        """Raise OSError if the file was deleted or moved away: a restart would not find it."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self._active_path.stat(), os.fstat(writing)):
                return
        raise OSError(
            errno.ENOENT, f"{self._active_path} was deleted or moved away; the images in it are lost at a restart"
        )

    def _retire(self) -> None:
        """Leave the failed segment for good; free the bytes of the failed group, or the file if it has no others."""
        fd, self._writing = self._writing, None
        # If the disk fails here too the segment stays as it is: every record is checked when it is read.
        if fd is not None:
            with suppress(OSError):
                os.ftruncate(fd, self._end)
            with suppress(OSError):
                os.close(fd)
        if self._end == 0:
            with suppress(OSError):
                self._delete(self._active)


def _header(payload: bytes) -> bytes:
    length = len(payload)
    crc = zlib.crc32(_LENGTH.pack(length))
    view = memoryview(payload)
    for start in range(0, length, _CRC_BYTES):
        crc = zlib.crc32(view[start : start + _CRC_BYTES], crc)
    return _HEADER.pack(_MAGIC, length, crc)


def _write_all(fd: int, buffers: Sequence[bytes], offset: int) -> None:
    """Call pwritev(2) until everything is written: it may stop short at a signal, a full disk or 2 GiB."""
    left = [memoryview(buffer) for buffer in buffers]
    while left:
        written = os.pwritev(fd, list(islice(left, _BUFFERS_PER_WRITE)), offset)
        offset += written
        done = 0
        while done < len(left) and written >= len(left[done]):
            written -= len(left[done])
            done += 1
        del left[:done]
        if written:
            left[0] = left[0][written:]


Reply = Callable[[Image | Duplicate | Refused | WriteFailed], None]
#: An image on its way to the disk, its payload, its connection, and the function that takes the answer.
Waiting = tuple[Image, bytes, bytes, Reply]


@dataclass(frozen=True, slots=True)
class ImageGroup:
    """Images written together, or none because of `error`; segments below `frontier` hold nothing of later groups."""

    images: list[tuple[Image, Reply]]
    keys: list[JournalKey]
    frontier: int
    error: Exception | None = None


class JournalThread:
    """Forms groups of images from any thread and passes each to `hand_on`; call `settled` once for each group."""

    def __init__(self, journal: Journal, disk_space: DiskSpace, hand_on: Callable[[ImageGroup], None]) -> None:
        self._journal = journal
        self._disk_space = disk_space
        self._hand_on = hand_on
        self._queue: queue.SimpleQueue[Waiting | Callable[[], None] | None] = queue.SimpleQueue()
        self._turns: FairQueue[Waiting] = FairQueue()
        self._ahead = threading.Semaphore(_GROUPS_AHEAD)
        self._begun_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="journal")

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Hand on every image that was given before this call, and end."""
        if self._thread.ident is None:
            return  # the start failed before this thread's turn
        self._queue.put(None)
        self._thread.join()

    def store_image(self, image: Image, payload: bytes, connection: bytes, reply: Reply) -> None:
        self._queue.put((image, payload, connection, reply))

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback`, which must not raise, between two groups: a proof that this thread runs."""
        self._queue.put(callback)

    def settled(self) -> None:
        self._ahead.release()

    def _run(self) -> None:
        while not self._stopping:
            self._sort(self._queue.get())
            self._drain()
            while len(self._turns):
                self._wait_for_more()
                self._ahead.acquire()
                self._drain()
                self._begun_s = time.monotonic()
                self._hand_on(self._append(self._turns.take_group(GROUP_IMAGES, GROUP_BYTES)))
                self._drain()

    def _wait_for_more(self) -> None:
        until_s = max(self._begun_s + _GROUP_EVERY_S, time.monotonic() + _BURST_S)
        while len(self._turns) < GROUP_IMAGES and not self._stopping and (wait_s := until_s - time.monotonic()) > 0:
            time.sleep(min(wait_s, _LOOK_EVERY_S))
            self._drain()

    def _drain(self) -> None:
        while not self._queue.empty():
            self._sort(self._queue.get())

    def _sort(self, item: Waiting | Callable[[], None] | None) -> None:
        if isinstance(item, tuple):
            image, payload, connection, _ = item
            self._turns.add((image.source, connection), item, len(payload))
        elif item is None:
            self._stopping = True
        else:
            item()

    def _append(self, images: list[Waiting]) -> ImageGroup:
        payloads = [payload for _, payload, _, _ in images]
        keys: list[JournalKey] = []
        failure: Exception | None = None
        try:
            shortage = self._disk_space.shortage(sum(map(len, payloads)))
            if shortage:
                failure = LowSpaceError(errno.ENOSPC, shortage)
            else:
                keys = self._journal.append(payloads)
        except Exception as error:  # noqa: BLE001 - the writer answers these images, and the line goes on
            failure = error
        without_bytes = [(image, reply) for image, _, _, reply in images]
        return ImageGroup(without_bytes, keys, self._journal.frontier, failure)


class SegmentCleanup:
    """Deletes the segments that no row needs, except those that a commit in doubt may still need.

    A failed commit stays in the database's log until another overwrites it. After a kill it may become valid, and then
    the journal has the only bytes of its images (docs/decisions.md, "A commit that failed"). Only the writer's thread
    calls it. Deleting is never urgent: a failure is retried with the next segment.
    """

    def __init__(self, journal: Journal, store: "Store") -> None:
        self._journal = journal
        self._store = store
        #: Segments below hold nothing of groups that are still to be answered; below `_frontier` they may go.
        self._answered = self._frontier = journal.frontier
        #: True from right before a commit of arrivals until it, or another after it that overwrites it, has succeeded.
        self.is_in_doubt = False
        self._failure: str | None = None
        self._log = structlog.get_logger("journal")

    def begin(self) -> None:
        self._journal.begin_after(max(self._store.segments_in_use, default=0))
        self._answered = self._frontier = self._journal.frontier
        self.drop()

    def end_doubt(self) -> None:
        """Overwrite a failed commit; raises the database's errors while it refuses writes."""
        self._store.write_over()
        self.is_in_doubt = False
        self._advance()

    def answered(self, frontier: int) -> None:
        """A group is answered, and segments below `frontier` hold nothing of later ones."""
        self._answered = max(self._answered, frontier)
        self._advance()

    def drop(self) -> None:
        failure = None
        try:
            self._journal.drop_segments(self._store.segments_in_use, self._frontier)
        except OSError as error:
            failure = str(error)
            if failure != self._failure:
                self._log.warning("segments_not_deleted", error=failure)
        self._failure = failure

    def _advance(self) -> None:
        if self._answered > self._frontier and not self.is_in_doubt:
            self._frontier = self._answered
            self.drop()
