"""What every message costs: credit of its connection, room in memory and in the backlog, its source's quota.

Only the intake thread calls, `hold` and `resume` excepted.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from daemon.config.settings import Limits
from daemon.intake.backlog import Backlog, BacklogLimits
from daemon.policy.quota import QuotaLimits, Quotas
from daemon.wire.messages import Answer, answer

#: While the daemon drains or the disk is full: somebody has to do something, so a second more costs nothing.
_HELD_RETRY_MS = 1000
#: Images in memory: few enough that their headers count for little beside the bytes, more than any credit.
_IMAGES_IN_MEMORY = 8192


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """Limits of one message, and how many unanswered ones a connection may have.

    `in_memory_bytes` are those of all images between their arrival and the disk; one source has half of them.
    """

    credit: int
    max_payload_bytes: int
    max_pixels: int
    in_memory_bytes: int = 512 * 2**20
    quota: QuotaLimits = field(default_factory=QuotaLimits)


def intake_limits(limits: Limits) -> IntakeLimits:
    """As a line is configured."""
    quota = QuotaLimits(limits.source_images_per_s, limits.source_bytes_per_s)
    return IntakeLimits(limits.credit, limits.max_payload_bytes, limits.max_pixels, limits.in_memory, quota)


def backlog_limits(limits: Limits) -> BacklogLimits:
    """As a line is configured."""
    return BacklogLimits(limits.backlog_images, limits.backlog_bytes, limits.source_images, limits.source_bytes)


@dataclass(frozen=True, slots=True)
class Peer:
    """Where an answer goes: the connection's identity, and the envelope that its message came in."""

    identity: bytes
    envelope: tuple[bytes, ...]


class Sent(Protocol):
    """Whose message it is, as far as an answer says so."""

    @property
    def image_id(self) -> str | None: ...
    @property
    def source(self) -> str | None: ...


class SentByKey(Protocol):
    """A message that is to be accepted."""

    @property
    def image_id(self) -> str: ...
    @property
    def source(self) -> str: ...


class Accounts:
    """The books; `in_flight` is 0 whenever every message has its answer."""

    def __init__(
        self, limits: IntakeLimits, backlog: Backlog, room: Callable[[int], str | None] = lambda _bytes: None
    ) -> None:
        """`room(bytes)`: why the disk takes no message of so many bytes now, None where it does."""
        self.limits = limits
        self.quotas = Quotas(limits.quota)
        self._backlog = backlog
        self._room = room
        half = _IMAGES_IN_MEMORY // 2, limits.in_memory_bytes // 2
        in_memory = BacklogLimits(_IMAGES_IN_MEMORY, limits.in_memory_bytes, *half)
        self._memory = Backlog(in_memory, waits_for="the disk")
        self._outstanding: Counter[bytes] = Counter()
        self._held: Mapping[str, str] = {}
        self._holding = threading.Lock()

    @property
    def in_flight(self) -> int:
        """Messages that wait for the writer, or to be looked at."""
        return self._outstanding.total()

    @property
    def bytes_in_memory(self) -> int:
        """Payloads on their way to the disk, or to be looked at."""
        return self._memory.bytes

    def hold(self, cause: str, reason: str) -> None:
        """Answer `busy` to new messages until `resume(cause)`; several causes may hold at once. Any thread."""
        with self._holding:
            self._held = {**self._held, cause: reason}

    def resume(self, cause: str) -> None:
        """Lift what `hold` with this cause began. Any thread."""
        with self._holding:
            self._held = {other: reason for other, reason in self._held.items() if other != cause}

    @property
    def held(self) -> tuple[str, ...]:
        """Why new messages hear `busy`; empty while they are taken. Any thread."""
        return tuple(self._held.values())

    # Answers that are owed

    def owe(self, peer: Peer) -> None:
        """One more message of this connection waits for its answer."""
        self._outstanding[peer.identity] += 1

    def answered(self, peer: Peer) -> None:
        self._outstanding[peer.identity] -= 1
        if not self._outstanding[peer.identity]:
            del self._outstanding[peer.identity]

    def is_over_credit(self, peer: Peer) -> bool:
        return self._outstanding[peer.identity] >= self.limits.credit

    def credit(self, source: str | None) -> int:
        """How many unanswered messages a connection of this source may have from now on."""
        room = self.limits.credit if source is None else self._backlog.room(source)
        return max(1, min(self.limits.credit, room))

    def busy(self, message: Sent, reason: str, retry_after_ms: int) -> Answer:
        """The answer that asks to send `message` again later."""
        credit = self.credit(message.source)
        return answer("busy", message.image_id, message.source, credit, retry_after_ms=retry_after_ms, reason=reason)

    def over_credit(self, message: Sent) -> Answer:
        reason = f"{self.limits.credit} messages of this connection are unanswered: wait for their answers"
        return self.busy(message, reason, 20)

    # Room

    def enter(self, peer: Peer, message: SentByKey, size_bytes: int) -> Answer | None:
        """Why this message has to wait outside; None once it is counted into memory and backlog, and has paid."""
        busy = self.wait_outside(peer, message, size_bytes)
        if busy is not None:
            return busy
        # Late, for the room counts whom it lets in.
        no_room = self._room(size_bytes)
        if no_room is not None:
            return self.busy(message, no_room, _HELD_RETRY_MS)
        full = self._memory.enter(message.source, size_bytes)
        if full is None:
            full = self._backlog.enter(message.source, size_bytes)
            if full is not None:
                self._memory.leave(message.source, size_bytes)
        if full is not None:
            return self.busy(message, full.reason, full.retry_after_ms)
        self.quotas.spend(message.source, size_bytes, time.monotonic())
        return None

    def wait_outside(self, peer: Peer, message: SentByKey, size_bytes: int) -> Answer | None:
        """Why this message has to wait, apart from the room there is."""
        for reason in self._held.values():
            return self.busy(message, reason, _HELD_RETRY_MS)
        if self.is_over_credit(peer):
            return self.over_credit(message)
        wait_s = self.quotas.wait_s(message.source, size_bytes, time.monotonic())
        if wait_s > 0:
            reason = f"source {message.source} is at its quota of images or bytes per second"
            return self.busy(message, reason, math.ceil(wait_s * 1000))
        return None

    def enter_memory(self, message: SentByKey, size_bytes: int) -> Answer | None:
        """Count a payload into memory while it is looked at; the answer where there is no room for it."""
        full = self._memory.enter(message.source, size_bytes)
        return None if full is None else self.busy(message, full.reason, full.retry_after_ms)

    def left_memory(self, source: str, size_bytes: int) -> None:
        self._memory.leave(source, size_bytes)

    def not_stored(self, source: str, size_bytes: int) -> None:
        """What entered and was not made durable leaves the backlog again."""
        self._backlog.leave(source, size_bytes)
