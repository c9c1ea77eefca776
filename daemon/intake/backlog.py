"""Limits on waiting images (`Backlog`), and on unanswered messages and bytes in memory (`Accounts`).

One `Backlog` counts accepted images until their verdict is durable, another those in memory until the disk has them:
number and bytes, per source and in total. Any thread may call it. `Accounts` belongs to the intake thread, except where
a method says "any thread".
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from daemon.config.settings import Limits
from daemon.records import Generation, Image
from daemon.storage.disk_space import VERDICT_BYTES, DiskSpace
from daemon.wire.messages import Answer, Message, answer


@dataclass(frozen=True, slots=True)
class BacklogLimits:
    """Maximum number and bytes of waiting images: in total, and of one source."""

    images: int
    bytes: int
    source_images: int
    source_bytes: int


@dataclass(frozen=True, slots=True)
class Full:
    """Why an image cannot be taken now, and when to retry."""

    reason: str
    retry_after_ms: int


@dataclass(slots=True)
class _Load:
    images: int = 0
    bytes: int = 0
    #: Of a source: the connection that sent the first of these images; None if a restart found it.
    connection: Hashable = None

    def change(self, images: int, size_bytes: int) -> None:
        self.images += images
        self.bytes += size_bytes


class Backlog:
    """Counters with limits. An empty backlog takes any one image, so that none waits forever.

    The last eighth of the whole is kept for sources and connections that hold less than their even share of it:
    publishers that flood the line, or invent a source for each image, cannot shut out one that sends now and then.
    """

    _MIN_RETRY_MS = 20
    _MAX_RETRY_MS = 2000

    def __init__(self, limits: BacklogLimits, waits_for: str = "their verdict") -> None:
        self._waits_for = waits_for
        self._lock = threading.RLock()
        #: May be replaced while images are counted: those stay.
        self.limits = limits
        self._all = _Load()
        self._sources: dict[str, _Load] = {}
        self._connections: defaultdict[Hashable, _Load] = defaultdict(_Load)
        self._released_at_s = time.monotonic()
        self._release_interval_s = 0.05

    @property
    def images(self) -> int:
        return self._all.images

    @property
    def bytes(self) -> int:
        return self._all.bytes

    def full(self, source: str, size_bytes: int, connection: Hashable) -> Full | None:
        """Return why an image has to wait now; None if there is room for it."""
        with self._lock:
            limits = self.limits
            if self._all.images == 0:
                return None
            mine = self._sources.get(source) or _Load(connection=connection)
            if mine.images and (mine.images >= limits.source_images or mine.bytes + size_bytes > limits.source_bytes):
                over = mine.images - limits.source_images
                reason = (
                    f"source {source} has {mine.images} images and {mine.bytes} bytes waiting for {self._waits_for}"
                )
                return self._wait(reason, over)
            eighths = 8 if self._is_modest(mine, size_bytes) else 7
            most_images, most_bytes = max(1, limits.images * eighths // 8), limits.bytes * eighths // 8
            if self._all.images >= most_images or self._all.bytes + size_bytes > most_bytes:
                reason = f"{self._all.images} images and {self._all.bytes} bytes wait for {self._waits_for}"
                return self._wait(reason, self._all.images - most_images)
            return None

    def add(self, source: str, size_bytes: int, connection: Hashable = None) -> None:
        """Count in an image that `full` found room for, or one that was accepted before a restart."""
        with self._lock:
            if source not in self._sources:
                self._sources[source] = _Load(connection=connection)
            mine = self._sources[source]
            for load in (mine, self._connections[mine.connection], self._all):
                load.change(1, size_bytes)

    def enter(self, source: str, size_bytes: int, connection: Hashable) -> Full | None:
        with self._lock:
            full = self.full(source, size_bytes, connection)
            if full is None:
                self.add(source, size_bytes, connection)
            return full

    def leave(self, source: str, size_bytes: int) -> None:
        """Count out an image whose verdict is durable, or that could not be made durable."""
        now_s = time.monotonic()
        with self._lock:
            mine = self._sources[source]
            theirs = self._connections[mine.connection]
            for load in (mine, theirs, self._all):
                load.change(-1, -size_bytes)
            if mine.images == 0:
                del self._sources[source]
            if theirs.images == 0:
                del self._connections[mine.connection]
            passed_s = min(now_s - self._released_at_s, 1.0)
            self._release_interval_s += (passed_s - self._release_interval_s) / 16
            self._released_at_s = now_s

    def room(self, source: str) -> int:
        """Return how many more images this source may send now, ignoring bytes."""
        with self._lock:
            mine = self._sources.get(source)
            left_of_mine = self.limits.source_images - (mine.images if mine else 0)
            return max(0, min(left_of_mine, self.limits.images - self._all.images))

    def _is_modest(self, mine: _Load, size_bytes: int) -> bool:
        """Return True if the source, and its connection, have less than their even share.

        A flood over many connections counts once, and so does a connection that invents sources.
        """
        limits, theirs = self.limits, self._connections.get(mine.connection) or _Load()
        sources = len(self._sources) + (mine.images == 0)
        sharers = min(sources, len(self._connections) + (theirs.images == 0))
        if theirs.images > mine.images:  # several sources, so no quota bounds it: leave room for another connection
            sharers = max(2, sharers)
        loads = (mine,) if mine.connection is None else (mine, theirs)
        return all(
            load.images < limits.images // sharers and load.bytes + size_bytes <= limits.bytes // sharers
            for load in loads
        )

    def _wait(self, reason: str, over_images: int) -> Full:
        """Refuse for about as long as `over_images` verdicts take, and eight more: part of a publisher's burst."""
        wait_ms = self._release_interval_s * 1000 * (max(0, over_images) + 8)
        return Full(reason, int(min(self._MAX_RETRY_MS, max(self._MIN_RETRY_MS, wait_ms))))


#: While the daemon drains or the disk is full, a person has to act: a second more does not matter.
_HELD_RETRY_MS = 1000
#: Images in memory: more than any credit, few enough that their headers are negligible.
_IMAGES_IN_MEMORY = 8192


def backlog_limits(limits: Limits) -> BacklogLimits:
    images, size_bytes = limits.backlog_images, limits.backlog_bytes
    return BacklogLimits(images, size_bytes, *(max(1, int(n * limits.source_share)) for n in (images, size_bytes)))


#: The address of an answer: the connection's identity, then the envelope of its message.
Peer = tuple[bytes, ...]


class Accounts:
    """Counts unanswered messages and bytes in memory; `in_flight` is 0 when every message has its answer."""

    def __init__(self, limits: Limits, backlog: Backlog, disk_space: DiskSpace) -> None:
        self.limits = limits
        self.backlog = backlog
        self._disk_space = disk_space
        # Of all images between their arrival and the disk one source may have half.
        half = _IMAGES_IN_MEMORY // 2, limits.in_memory // 2
        in_memory = BacklogLimits(_IMAGES_IN_MEMORY, limits.in_memory, *half)
        #: Payloads that wait for the disk or for a scan.
        self.memory = Backlog(in_memory, waits_for="the disk")
        self._outstanding: Counter[bytes] = Counter()
        self._held: Mapping[str, str] = {}
        self._holding = threading.Lock()

    @property
    def in_flight(self) -> int:
        """The number of messages that wait for the writer or for a scan."""
        return self._outstanding.total()

    def hold(self, cause: str, reason: str) -> None:
        """Answer `busy` to new messages until `resume(cause)`; several causes may hold at once. Any thread."""
        with self._holding:
            self._held = {**self._held, cause: reason}

    def resume(self, cause: str) -> None:
        with self._holding:
            self._held = {key: reason for key, reason in self._held.items() if key != cause}

    @property
    def held(self) -> tuple[str, ...]:
        """Return the reasons why new messages are answered `busy`; empty while they are taken. Any thread."""
        return tuple(self._held.values())

    # Unanswered messages

    def count_unanswered(self, peer: Peer) -> None:
        self._outstanding[peer[0]] += 1

    def answered(self, peer: Peer) -> None:
        self._outstanding[peer[0]] -= 1
        if not self._outstanding[peer[0]]:
            del self._outstanding[peer[0]]

    def is_over_credit(self, peer: Peer) -> bool:
        return self._outstanding[peer[0]] >= self.limits.credit

    def credit(self, source: str | None) -> int:
        """Return how many unanswered messages a connection of this source may have from now on."""
        room = self.limits.credit if source is None else self.backlog.room(source)
        return max(1, min(self.limits.credit, room))

    def busy(self, message: Message, reason: str, retry_after_ms: int) -> Answer:
        credit = self.credit(message.source)
        return answer("busy", message.image_id, message.source, credit, retry_after_ms=retry_after_ms, reason=reason)

    def over_credit(self, message: Message) -> Answer:
        reason = f"{self.limits.credit} messages of this connection are unanswered: wait for their answers"
        return self.busy(message, reason, 20)

    # Room

    def enter(self, peer: Peer, message: Image | Generation, size_bytes: int) -> Answer | None:
        """Count a message into memory and backlog and return None, or return its `busy`."""
        busy = self.refuse_for_now(peer, message)
        if busy is not None:
            return busy
        image = message.source, size_bytes, peer[0]
        full = self.memory.full(*image) or self.backlog.full(*image)
        if full is not None:
            return self.busy(message, full.reason, full.retry_after_ms)
        disk, disk_bytes = self._disk_space, size_bytes + VERDICT_BYTES
        if disk.admitted_bytes + disk_bytes > disk.admit_until_bytes and (no_room := disk.problem(size_bytes)):
            return self.busy(message, no_room, _HELD_RETRY_MS)
        disk.admitted_bytes += disk_bytes
        self.memory.add(*image)
        self.backlog.add(*image)
        return None

    def refuse_for_now(self, peer: Peer, message: Image | Generation) -> Answer | None:
        for reason in self._held.values():
            return self.busy(message, reason, _HELD_RETRY_MS)
        return self.over_credit(message) if self.is_over_credit(peer) else None
