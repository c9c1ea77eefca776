"""What intake answers to each message: the order of checks of PROTOCOL.md, credit, back-pressure, duplicates in flight.

No sockets and no threads here: frames in, an answer out, or a promise that is settled when the writer replies. Only
the intake thread calls, `hold` and `resume` excepted.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import structlog

from daemon.backlog import Backlog
from daemon.frames import Code, MessageError
from daemon.image_header import ImageHeaderError, check_image
from daemon.messages import VERSION, Answer, Generate, Hello, Inspect, Message, ResultsSince, answer, parse
from daemon.quarantine import Quarantine
from daemon.records import Accepted, Arrival, BoardRef
from daemon.rulebook import Rulebook
from routing_rules.routes import Routes

#: While the daemon drains or the disk is full: somebody has to do something, so a second more costs nothing.
_HELD_RETRY_MS = 1000
#: A write that failed is tried again soon; the publisher's own patience spaces further ones.
_FAILED_RETRY_MS = 500

Key = tuple[str, str]  # (source, id)


@runtime_checkable
class Known(Protocol):
    """An image that was accepted before."""

    @property
    def payload_sha256(self) -> str: ...


class Reader(Protocol):
    """What intake reads of the results; called in the intake thread."""

    def find(self, source: str, image_id: str) -> Known | None: ...
    def open_rules(self, board_type: str, serial: str, attempt: int | None) -> str | None: ...
    def last_seq(self) -> int: ...


class NotStored(Protocol):
    """Why an image could not be made durable."""

    @property
    def reason(self) -> str: ...


#: What becomes of an arrival at the writer.
Stored = Accepted | Known | NotStored


class ArrivalWriter(Protocol):
    """Makes arrivals durable; `reply` is called once, from another thread."""

    def submit(self, arrival: Arrival, reply: Callable[[Stored], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """Limits of one message, and how many unanswered ones a connection may have."""

    credit: int
    max_payload_bytes: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class Peer:
    """Where an answer goes: the connection's identity, and the envelope that its message came in."""

    identity: bytes
    envelope: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Settled:
    """The writer's reply to one arrival."""

    key: Key
    result: Stored


@dataclass(frozen=True, slots=True)
class _WriterBroke:
    """The writer did not take an arrival at all."""

    reason: str


@dataclass(slots=True)
class _InFlight:
    """An arrival at the writer, and the repetitions of it that came meanwhile, each with its payload's sha256."""

    peer: Peer
    sha256: str
    payload_bytes: int
    repeated: list[tuple[Peer, str]] = field(default_factory=list)


class Admission:
    """Checks, answers and accounts; `in_flight` is empty whenever every message has its answer."""

    def __init__(
        self,
        limits: IntakeLimits,
        rulebook: Rulebook,
        reader: Reader,
        writer: ArrivalWriter,
        backlog: Backlog,
        quarantine: Quarantine,
        server: str = "coserve",
    ) -> None:
        self.limits = limits
        self._rulebook = rulebook
        self._reader = reader
        self._writer = writer
        self._backlog = backlog
        self._quarantine = quarantine
        self._server = server
        self._in_flight: dict[Key, _InFlight] = {}
        self._outstanding: Counter[bytes] = Counter()
        self._held: Mapping[str, str] = {}
        self._log = structlog.get_logger("intake")

    @property
    def in_flight(self) -> int:
        """Messages that wait for the writer."""
        return self._outstanding.total()

    def hold(self, cause: str, reason: str) -> None:
        """Answer `busy` to new images until `resume(cause)`; several causes may hold at once. Any thread."""
        self._held = {**self._held, cause: reason}

    def resume(self, cause: str) -> None:
        """Lift what `hold` with this cause began. Any thread."""
        self._held = {other: reason for other, reason in self._held.items() if other != cause}

    def take(
        self, peer: Peer, frames: Sequence[bytes], post: Callable[[Settled], None]
    ) -> Answer | ResultsSince | None:
        """The answer to a message; None where it comes once `post` was called; a ResultsSince is the caller's part."""
        try:
            message, payload = parse(frames)
        except MessageError as error:
            return self._rejected(error)
        if isinstance(message, ResultsSince):
            return message
        try:
            return self._handle(peer, message, payload or b"", post)
        except MessageError as error:
            return self._rejected(error)
        except Exception:  # noqa: BLE001 - one message may not stop the line, whatever it broke
            self._log.exception("intake_failed", source=message.source, id=message.image_id)
            return self.busy(message, "the daemon cannot look at this message now", _FAILED_RETRY_MS)

    def _handle(
        self, peer: Peer, message: Inspect | Generate | Hello, payload: bytes, post: Callable[[Settled], None]
    ) -> Answer | None:
        match message:
            case Inspect():
                return self._inspect(peer, message, payload, post)
            case Generate():
                raise _refusal(message, "unknown_model", "the configuration names no such model")
            case Hello():
                return self._welcome(message)

    def settle(self, settled: Settled) -> list[tuple[Peer, Answer]]:
        """The answers that the writer's reply to one arrival sets free."""
        source, image_id = settled.key
        flight = self._in_flight.pop(settled.key, None)
        if flight is None:
            self._log.error("reply_without_message", source=source, id=image_id)
            return []
        everyone = [(flight.peer, flight.sha256), *flight.repeated]
        for peer, _ in everyone:
            self._outstanding[peer.identity] -= 1
            if not self._outstanding[peer.identity]:
                del self._outstanding[peer.identity]
        credit = self._credit(source)

        def duplicate(peer: Peer, differs: bool) -> tuple[Peer, Answer]:
            return peer, answer("duplicate", image_id, source, credit, differs=differs)

        if isinstance(settled.result, Accepted):
            accepted = answer("accepted", image_id, source, credit)
            return [(flight.peer, accepted), *(duplicate(p, sha != flight.sha256) for p, sha in flight.repeated)]
        self._backlog.leave(source, flight.payload_bytes)
        if isinstance(settled.result, Known):
            stored_sha256 = settled.result.payload_sha256
            return [duplicate(peer, sha256 != stored_sha256) for peer, sha256 in everyone]
        reason = f"the image could not be stored: {settled.result.reason}"
        again = answer("busy", image_id, source, credit, retry_after_ms=_FAILED_RETRY_MS, reason=reason)
        return [(peer, again) for peer, _ in everyone]

    def busy(self, message: Message, reason: str, retry_after_ms: int) -> Answer:
        """The answer that asks to send `message` again later."""
        credit = self._credit(message.source)
        return answer("busy", message.image_id, message.source, credit, retry_after_ms=retry_after_ms, reason=reason)

    def credit(self, message: Message) -> int:
        """How many unanswered messages this message's connection may have from now on."""
        return self._credit(message.source)

    def _credit(self, source: str | None) -> int:
        room = self.limits.credit if source is None else self._backlog.room(source)
        return max(1, min(self.limits.credit, room))

    def _rejected(self, error: MessageError) -> Answer:
        credit = self._credit(error.source)
        return answer("rejected", error.image_id, error.source, credit, code=error.code, reason=error.reason)

    def _welcome(self, message: Hello) -> Answer:
        return answer(
            "welcome",
            message.image_id,
            message.source,
            self._credit(message.source),
            version=VERSION,
            server=self._server,
            max_payload_bytes=self.limits.max_payload_bytes,
            max_pixels=self.limits.max_pixels,
            rules_version=self._rulebook.current.version,
            last_seq=self._reader.last_seq(),
        )

    def _inspect(self, peer: Peer, message: Inspect, payload: bytes, post: Callable[[Settled], None]) -> Answer | None:
        key = (message.source, message.image_id)
        flight = self._in_flight.get(key)
        if flight is not None:
            return self._repeat(peer, message, payload, flight)
        known = self._reader.find(*key)
        if known is not None:
            differs = known.payload_sha256 != hashlib.sha256(payload).hexdigest()
            return answer("duplicate", message.image_id, message.source, self._credit(message.source), differs=differs)
        self._check_rules(message)
        sha256 = self._check_payload(message, payload)
        busy = self._busy_now(peer, message, len(payload))
        if busy is not None:
            return busy
        self._in_flight[key] = _InFlight(peer, sha256, len(payload))
        self._outstanding[peer.identity] += 1
        try:
            self._writer.submit(_arrival(message, payload, sha256), lambda result: post(Settled(key, result)))
        except Exception as error:  # noqa: BLE001 - whatever it is, this image is not durable
            self._log.exception("writer_refused", source=message.source, id=message.image_id)
            return self.settle(Settled(key, _WriterBroke(str(error))))[0][1]
        return None

    def _repeat(self, peer: Peer, message: Inspect, payload: bytes, flight: _InFlight) -> Answer | None:
        """A second copy of an image on its way to the disk: answered with it, since it may not reach the disk."""
        if self._outstanding[peer.identity] >= self.limits.credit:
            return self._over_credit(message)
        flight.repeated.append((peer, hashlib.sha256(payload).hexdigest()))
        self._outstanding[peer.identity] += 1
        return None

    def _check_rules(self, message: Inspect) -> None:
        routes = self._rules_of(message.board)
        if message.board.type not in routes.recipes:
            raise _refusal(message, "unknown_board", f"the rules name no board type {message.board.type!a}")
        if routes.first_step(message.board.type, message.component) is None:
            reason = f"the recipe of board type {message.board.type!a} has no component {message.component!a}"
            raise _refusal(message, "unknown_component", reason)

    def _rules_of(self, board: BoardRef) -> Routes:
        """The rules that the attempt which takes this image opened with; those in force where it opens one."""
        if self._rulebook.is_alone:
            return self._rulebook.current
        version = self._reader.open_rules(board.type, board.serial, board.attempt)
        kept = None if version is None else self._rulebook.get(version)
        return kept or self._rulebook.current

    def _check_payload(self, message: Inspect, payload: bytes) -> str:
        """The payload's sha256, once its structure is right; a bad image is kept in the quarantine."""
        if not payload:
            raise _refusal(message, "bad_image", "the payload is missing or empty")
        if len(payload) > self.limits.max_payload_bytes:
            reason = f"the payload has {len(payload)} bytes, at most {self.limits.max_payload_bytes} are taken"
            raise _refusal(message, "too_large", reason)
        try:
            check_image(payload, message.pixels, self.limits.max_pixels)
        except ImageHeaderError as error:
            if error.code == "bad_image":
                self._quarantine.keep(message.source, message.image_id, payload, error.reason)
            raise _refusal(message, error.code, error.reason) from None
        sha256 = hashlib.sha256(payload).hexdigest()
        if message.sha256 is not None and message.sha256 != sha256:
            reason = f"the payload's sha256 is {sha256}, not the one in the header"
            self._quarantine.keep(message.source, message.image_id, payload, reason)
            raise _refusal(message, "bad_image", reason)
        return sha256

    def _busy_now(self, peer: Peer, message: Inspect, payload_bytes: int) -> Answer | None:
        """Why this image has to wait outside; None once it is counted into the backlog."""
        for reason in self._held.values():
            return self.busy(message, reason, _HELD_RETRY_MS)
        if self._outstanding[peer.identity] >= self.limits.credit:
            return self._over_credit(message)
        full = self._backlog.enter(message.source, payload_bytes)
        return self.busy(message, full.reason, full.retry_after_ms) if full else None

    def _over_credit(self, message: Message) -> Answer:
        reason = f"{self.limits.credit} messages of this connection are unanswered: wait for their answers"
        return self.busy(message, reason, 20)


def _arrival(message: Inspect, payload: bytes, sha256: str) -> Arrival:
    return Arrival(
        source=message.source,
        image_id=message.image_id,
        board=message.board,
        component=message.component,
        designator=message.designator,
        captured_at=message.captured_at,
        deadline_ms=message.deadline_ms,
        pixels=message.pixels,
        payload=payload,
        payload_sha256=sha256,
    )


def _refusal(message: Message, code: Code, reason: str) -> MessageError:
    return MessageError(code, reason, message.image_id, message.source)
