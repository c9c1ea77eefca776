"""Decide the answer to each message, in PROTOCOL.md's order of checks. Limits are in backlog.py.

No sockets and no threads here: only the intake thread may call it, except for `hold` and `resume`.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from daemon.config.settings import Limits
from daemon.intake.backlog import Accounts, Backlog, Peer
from daemon.line.serving import Serving
from daemon.records import BoardRef, Duplicate, Generation, Image, Pixels, Refused, WriteFailed
from daemon.storage.disk_space import DiskSpace
from daemon.storage.quarantine import Quarantine
from daemon.wire.messages import VERSION, Answer, Code, Hello, Message, MessageError, answer, parse
from experts.errors import ImageHeaderError, LongWalkError
from experts.vision.structure import MAX_STEPS, check_structure
from routing_rules.routes import Routes

T = TypeVar("T")

#: A publisher retries soon after a failed write; its own back-off spaces further ones.
_FAILED_RETRY_MS = 500
#: Larger payloads, and those with more parts, are scanned in another thread: the intake's turns stay short.
_LARGE_BYTES = 2**20
_MANY_STEPS = 2000

#: The writer's reply to an image: accepted, the earlier image with the same key, why its edition cannot route it, or
#: the reason of a failure.
Stored = Image | Duplicate | Refused | WriteFailed


class Reader(Protocol):
    """Queries of intake to the results; called in the intake thread."""

    def find(self, source: str, image_id: str) -> str | None: ...
    def open_edition(self, board_type: str, serial: str, attempt: int | None) -> int | None: ...
    def find_text(self, source: str, request_id: str) -> Generation | None: ...
    def last_seq(self) -> int: ...


TextStored = Generation | Duplicate | WriteFailed


class Writer(Protocol):
    """Makes images (fairly by source and `connection`) and texts durable; another thread calls `reply`, once."""

    def store_image(self, image: Image, payload: bytes, connection: bytes, reply: Callable[[Stored], None]) -> None: ...
    def store_generation(self, request: Generation, reply: Callable[[TextStored], None]) -> None: ...


class TextModel(Protocol):
    """Facts about a model that are known without running it."""

    def problem(self, request: Generation) -> str | None: ...


def refusal(message: Message, code: Code, reason: str) -> MessageError:
    return MessageError(code, reason, message.image_id, message.source)


#: The name of an image or of a request for text: one of each may have the same source and id.
Key = tuple[type, str, str]


def _key(message: Image | Generation) -> Key:
    return type(message), message.source, message.image_id


#: A payload's sha256 (lower-case hex), and the flaw of its structure; None if it is sound.
PayloadScan = tuple[str, ImageHeaderError | None]


def scan_payload(payload: bytes, pixels: Pixels, max_pixels: int, max_steps: int = MAX_STEPS) -> PayloadScan:
    """LongWalkError if the structure has more than `max_steps` parts."""
    flaw: ImageHeaderError | None = None
    try:
        check_structure(payload, max_pixels, max_steps, raw_shape=pixels.shape)
    except ImageHeaderError as error:
        flaw = error.with_traceback(None)  # it outlives this call, and must not keep the payload alive
    return hashlib.sha256(payload).hexdigest(), flaw


#: The sender of a message that is at the writer, then those who repeated it, each with the `content` to compare.
_InFlight = list[tuple[Peer, object]]

#: Answers that a reply of another thread makes possible, worked out in the intake thread.
Reply = Callable[[], list[tuple[Peer, Answer]]]


class Admission(Accounts):
    """Checks messages and answers them; `Accounts` counts what they cost."""

    #: Set by the intake: calls a reply in its thread.
    post: Callable[[Reply], None]
    #: Set by the intake: scans a large payload on another thread; hashing 64 MB takes some 50 ms.
    scan_elsewhere: Callable[[Callable[[], None]], None]

    def __init__(  # noqa: PLR0913, PLR0917  the checks of every message come together here
        self,
        limits: Limits,
        serving: Serving,
        reader: Reader,
        writer: Writer,
        backlog: Backlog,
        quarantine: Quarantine,
        server: str = "coserve",
        disk_space: DiskSpace | None = None,
        models: Mapping[str, TextModel] | None = None,
        on_stored: Callable[[float], None] = lambda _seconds: None,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        """`on_stored(seconds)` is called with the time that each accepted image spent at the writer.

        `identity` is `line` and `epoch`, for each `welcome`.
        """
        super().__init__(limits, backlog, disk_space or DiskSpace({}))
        self._models = models or {}
        self._on_stored = on_stored
        self._serving = serving
        self._reader = reader
        self._writer = writer
        self._quarantine = quarantine
        self._server = server
        self._identity = identity or {}
        self._in_flight: dict[Key, _InFlight] = {}
        self._is_unread = False
        self._log = structlog.get_logger("intake")

    def read(self, frames: Sequence[bytes]) -> tuple[Message, bytes] | Answer:
        try:
            message, payload = parse(frames)
        except MessageError as error:
            return self._rejected(error)
        return message, payload or b""

    def admit_message(self, peer: Peer, message: Image | Generation | Hello, payload: bytes) -> Answer | None:
        """Return the answer; None if a reply of another thread will give it."""
        return self._answer(message, lambda: self._handle(peer, message, payload))

    def _scanned(
        self, peer: Peer, message: Image, payload: bytes, scan: PayloadScan | None
    ) -> list[tuple[Peer, Answer]]:
        """Continue with an image whose payload another thread has scanned; `scan` is None if that failed."""
        self.memory.leave(message.source, len(payload))
        self.answered(peer)
        if scan is None:
            return [(peer, self._failed(message))]
        given = self._answer(message, lambda: self._inspect(peer, message, payload, scan))
        return [] if given is None else [(peer, given)]

    def _answer(self, message: Message, decide: Callable[[], T]) -> T | Answer:
        try:
            return self._still_unread(message) or decide()
        except MessageError as error:
            return self._rejected(error)
        except SQLAlchemyError as error:
            return self._unread(message, error)
        except Exception:  # noqa: BLE001 - one message must not stop the line
            return self._failed(message)

    def _failed(self, message: Message) -> Answer:
        self._log.exception("intake_failed", source=message.source, id=message.image_id)
        return self.busy(message, "the daemon cannot look at this message now", _FAILED_RETRY_MS)

    def _unread(self, message: Message, error: SQLAlchemyError) -> Answer:
        why = str(getattr(error, "orig", error)).partition("\n")[0]
        self._log.warning("intake_waits", source=message.source, id=message.image_id, error=why)
        self._is_unread = True
        reason = next(iter(self.held), None) or "the database cannot be read now"
        return self.busy(message, reason, _FAILED_RETRY_MS)

    def _still_unread(self, message: Message) -> Answer | None:
        """Answer `busy` without a query while the database is known to be unreadable: each query may take 10 s."""
        reason = next(iter(self.held), None) if self._is_unread else None
        self._is_unread = reason is not None
        return None if reason is None else self.busy(message, reason, _FAILED_RETRY_MS)

    def _handle(self, peer: Peer, message: Image | Generation | Hello, payload: bytes) -> Answer | None:
        match message:
            case Image():
                if _LARGE_BYTES < len(payload) <= self.limits.max_payload_bytes:
                    return self._scan_elsewhere(peer, message, payload)
                try:
                    return self._inspect(peer, message, payload, None)
                except LongWalkError:
                    return self._scan_elsewhere(peer, message, payload)
            case Generation():
                return self._generate(peer, message)
            case Hello():
                return self._welcome(message)

    def _settle(
        self, message: Image | Generation, size_bytes: int, since_s: float, result: Stored | TextStored
    ) -> list[tuple[Peer, Answer]]:
        """Answer a message and its repetitions, which waited for the writer since `since_s`."""
        key, source = message.image_id, message.source
        everyone = self._in_flight.pop(_key(message), [])
        if not everyone:
            self._log.error("reply_without_message", source=source, id=key)
            return []
        self.memory.leave(source, size_bytes)
        for peer, _ in everyone:
            self.answered(peer)
        credit = self.credit(source)
        (sender, first), *others = everyone
        if isinstance(result, Image | Generation):
            fields = {}
            if isinstance(result, Image):
                self._on_stored(time.monotonic() - since_s)
                fields = {"attempt": result.attempt, "edition": result.edition}
            answers = [(sender, answer("accepted", key, source, credit, **fields))]
        else:
            self.backlog.leave(source, size_bytes)
            if isinstance(result, WriteFailed):
                kind = "image" if isinstance(message, Image) else "request"
                reason = f"the {kind} could not be stored: {result.reason}"
                again = answer("busy", key, source, credit, retry_after_ms=_FAILED_RETRY_MS, reason=reason)
                return [(peer, again) for peer, _ in everyone]
            if isinstance(result, Refused):
                no = answer("rejected", key, source, credit, code=result.code, reason=result.reason)
                return [(peer, no) for peer, _ in everyone]
            answers, first, others = [], result.content, everyone
        for peer, content in others:
            answers.append((peer, answer("duplicate", key, source, credit, differs=content != first)))
        return answers

    def _rejected(self, error: MessageError) -> Answer:
        credit = self.credit(error.source)
        return answer("rejected", error.image_id, error.source, credit, code=error.code, reason=error.reason)

    def _welcome(self, message: Hello) -> Answer:
        return answer(
            "welcome",
            message.image_id,
            message.source,
            self.credit(message.source),
            version=VERSION,
            server=self._server,
            max_payload_bytes=self.limits.max_payload_bytes,
            max_pixels=self.limits.max_pixels,
            rules_version=self._serving.current.routes.version,
            last_seq=self._reader.last_seq(),
            **self._identity,
        )

    def _scan_elsewhere(self, peer: Peer, message: Image, payload: bytes) -> Answer | None:
        """Check all but the payload, then ask for its scan; the payload waits in memory, as other images do."""
        is_new = _key(message) not in self._in_flight
        if is_new and self._reader.find(message.source, message.image_id) is None:
            self._check_rules(message)
            busy = self.refuse_for_now(peer, message)
            if busy is not None:
                return busy
        full = self.memory.enter(message.source, len(payload), peer[0])
        if full is not None:
            return self.busy(message, full.reason, full.retry_after_ms)
        self.count_unanswered(peer)

        def scan() -> None:
            result: PayloadScan | None = None
            try:
                result = scan_payload(payload, message.pixels, self.limits.max_pixels)
            except Exception:  # noqa: BLE001 - one image must not stop the line
                self._log.exception("payload_scan_failed", source=message.source)
            self.post(lambda: self._scanned(peer, message, payload, result))

        self.scan_elsewhere(scan)
        return None

    def _inspect(self, peer: Peer, message: Image, payload: bytes, scan: PayloadScan | None) -> Answer | None:
        """Accept an image; `scan` is its payload's, if there is one. LongWalkError if a scan takes too long here."""
        if (flight := self._in_flight.get(_key(message))) is not None:
            sha256, _ = scan or self._scan(message, payload)
            return self._repeat(peer, message, sha256, flight)
        if (known := self._reader.find(message.source, message.image_id)) is not None:
            sha256, _ = scan or self._scan(message, payload)
            return self._duplicate(message, differs=known != sha256)
        self._check_rules(message)
        sha256 = self._check_payload(message, payload, scan)
        image = message if message.sha256 else replace(message, sha256=sha256)
        write = partial(self._writer.store_image, image, payload, peer[0])
        return self._store(peer, message, sha256, len(payload), write)

    def _generate(self, peer: Peer, request: Generation) -> Answer | None:
        if (flight := self._in_flight.get(_key(request))) is not None:
            return self._repeat(peer, request, request.content, flight)
        if (known := self._reader.find_text(request.source, request.request_id)) is not None:
            return self._duplicate(request, differs=known.content != request.content)
        self._check_request(request)
        write = partial(self._writer.store_generation, request)
        return self._store(peer, request, request.content, request.size_bytes, write)

    def _store(
        self,
        peer: Peer,
        message: Image | Generation,
        content: object,
        size_bytes: int,
        write: Callable[[Callable[[Stored | TextStored], None]], None],
    ) -> Answer | None:
        busy = self.enter(peer, message, size_bytes)
        if busy is not None:
            return busy
        self._in_flight[_key(message)] = [(peer, content)]
        self.count_unanswered(peer)
        settle = partial(self._settle, message, size_bytes, time.monotonic())
        try:
            write(lambda result: self.post(lambda: settle(result)))
        except Exception as error:  # noqa: BLE001 - this message is not durable
            self._log.exception("writer_refused", source=message.source, id=message.image_id)
            return settle(WriteFailed(str(error)))[0][1]
        return None

    def _duplicate(self, message: Image | Generation, *, differs: bool) -> Answer:
        return answer("duplicate", message.image_id, message.source, self.credit(message.source), differs=differs)

    def _scan(self, message: Image, payload: bytes) -> PayloadScan:
        if len(payload) > self.limits.max_payload_bytes:
            return "", None  # no stored image is as large
        return scan_payload(payload, message.pixels, self.limits.max_pixels, _MANY_STEPS)

    def _repeat(self, peer: Peer, message: Image | Generation, content: object, flight: _InFlight) -> Answer | None:
        """Answer a second copy of a message together with the first, which may still fail to reach the disk."""
        if self.is_over_credit(peer):
            return self.over_credit(message)
        flight.append((peer, content))
        self.count_unanswered(peer)
        return None

    def _check_rules(self, message: Image) -> None:
        """Refuse early what the board's edition cannot route; the transaction that takes the image decides."""
        problem = self._routes_of(message.board).refusal(message.board.type, message.component, message.designator)
        if problem is not None:
            raise refusal(message, *problem)

    def _check_request(self, request: Generation) -> None:
        if request.board is not None and request.board.type not in self._serving.current.routes.recipes:
            raise refusal(request, "unknown_board", f"the rules name no board type {request.board.type!a}")
        model = self._models.get(request.model)
        if model is None:
            names = ", ".join(self._models) or "it has none"
            raise refusal(request, "unknown_model", f"the configuration names no model {request.model!a} ({names})")
        problem = model.problem(request)
        if problem is not None:
            raise refusal(request, "bad_field", problem)

    def _routes_of(self, board: BoardRef) -> Routes:
        if len(self._serving.served) == 1:
            return self._serving.current.routes
        edition = self._reader.open_edition(board.type, board.serial, board.attempt)
        served = None if edition is None else self._serving.served.get(edition)
        return (served or self._serving.current).routes

    def _check_payload(self, message: Image, payload: bytes, scan: PayloadScan | None) -> str:
        if not payload:
            raise refusal(message, "bad_image", "the payload is missing or empty")
        if len(payload) > self.limits.max_payload_bytes:
            reason = f"the payload has {len(payload)} bytes, at most {self.limits.max_payload_bytes} are taken"
            raise refusal(message, "too_large", reason)
        sha256, flaw = scan or self._scan(message, payload)
        if flaw is not None:
            if flaw.code == "bad_image":
                self._quarantine.keep(message.source, message.image_id, payload, flaw.reason)
            raise refusal(message, flaw.code, flaw.reason)
        if message.sha256 not in ("", sha256):
            reason = f"the payload's sha256 is {sha256}, not the one in the header"
            self._quarantine.keep(message.source, message.image_id, payload, reason)
            raise refusal(message, "bad_image", reason)
        return sha256
