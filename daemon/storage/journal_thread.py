"""The journal thread: arrivals in groups that take turns by source, each group's bytes durable with one `fdatasync`.

While it syncs one group the writer commits the rows of the one before. A group that cannot be written is handed on too,
in its place, so that every image is answered once.
"""

import errno
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from daemon.policy.fair_queue import Turns
from daemon.records import Accepted, Arrival, JournalKey
from daemon.storage.disk_space import DiskSpace, LowSpaceError
from daemon.storage.journal import Journal

#: The bounds of a group, so that no image waits long behind one sync; one larger image makes a group of its own.
GROUP_IMAGES = 64
GROUP_BYTES = 4 * 2**20
#: A smaller group waits for more: as long as the group before took from here to its answers, within these bounds. So a
#: busy processor or a slow disk makes larger groups, and not more work.
_ENOUGH_IMAGES = 32
_MIN_WAIT_S = 0.002
_MAX_WAIT_S = 0.010
#: Groups between the journal and the database: one that is synced, one whose rows are committed.
_GROUPS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The image is not stored: its publisher keeps it and sends it again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The image was accepted before, with this payload."""

    payload_sha256: str


Reply = Callable[[Accepted | Duplicate | WriteFailed], None]


@dataclass(frozen=True, slots=True)
class WaitingArrival:
    """An image on its way to the disk, and the function that takes the answer."""

    arrival: Arrival
    reply: Reply

    @property
    def key(self) -> tuple[str, str]:
        return (self.arrival.source, self.arrival.image_id)


@dataclass(frozen=True, slots=True)
class ArrivalGroup:
    """Images whose bytes are durable, each at its key; or none of them is, because of `error`.

    Journal segments below `frontier` hold nothing of later groups.
    """

    images: list[WaitingArrival]
    keys: list[JournalKey]
    frontier: int
    error: Exception | None = None


class JournalThread:
    """Takes images from any thread; calls `hand_on` in its own, group by group. Call `settled` once for each group."""

    def __init__(self, journal: Journal, disk_space: DiskSpace, hand_on: Callable[[ArrivalGroup], None]) -> None:
        self._journal = journal
        self._disk_space = disk_space
        self._hand_on = hand_on
        self._queue: queue.SimpleQueue[WaitingArrival | Callable[[], None] | None] = queue.SimpleQueue()
        self._turns: Turns[WaitingArrival] = Turns()
        self._ahead = threading.Semaphore(_GROUPS_AHEAD)
        self._begun_s: deque[float] = deque()
        self._took_s = 0.0
        self._stopping = False
        self._log = structlog.get_logger("journal")
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

    def write(self, image: WaitingArrival) -> None:
        """Write `image` with one of the next groups."""
        self._queue.put(image)

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback` between two groups, in this thread, as a proof that it runs (pipeline_probe.py)."""
        self._queue.put(callback)

    def settled(self) -> None:
        """Note that a group is answered; the next may follow."""
        self._took_s = time.monotonic() - self._begun_s.popleft()
        self._ahead.release()

    def _run(self) -> None:
        while not self._stopping:
            self._sort(self._queue.get())
            self._drain()
            while len(self._turns):
                self._wait_for_more()
                self._ahead.acquire()
                self._drain()
                images = self._turns.take(GROUP_IMAGES, GROUP_BYTES)
                self._begun_s.append(time.monotonic())
                self._hand_on(self._append(images))
                self._drain()

    def _wait_for_more(self) -> None:
        until_s = time.monotonic() + min(max(_MIN_WAIT_S, self._took_s), _MAX_WAIT_S)
        while len(self._turns) < _ENOUGH_IMAGES and not self._stopping and time.monotonic() < until_s:
            time.sleep(_MIN_WAIT_S)  # waiting at the queue would wake this thread for each image
            self._drain()

    def _drain(self) -> None:
        while not self._queue.empty():
            self._sort(self._queue.get())

    def _sort(self, item: WaitingArrival | Callable[[], None] | None) -> None:
        if isinstance(item, WaitingArrival):
            self._turns.add(item.arrival.source, item, len(item.arrival.payload))
        elif item is None:
            self._stopping = True
        else:
            self._call(item)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 - a callback's failure is its own
            self._log.exception("callback_failed")

    def _append(self, images: list[WaitingArrival]) -> ArrivalGroup:
        payloads = [image.arrival.payload for image in images]
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
        return ArrivalGroup(images, keys, self._journal.frontier, failure)
