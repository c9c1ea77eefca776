"""The intake thread: owns the ROUTER socket, hands messages to `Admission` and its answers back to the peers.

What takes long (catching up, scans of large payloads) is done by other threads, so that no image waits for it.
"""

import termios
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import structlog
import zmq

from daemon.host.worker import Worker
from daemon.intake.admission import Admission, Reply
from daemon.intake.backlog import Peer
from daemon.intake.catch_up import CatchUps, Page, ResultsReader
from daemon.records import Generation, Image
from daemon.wire.connection_guard import ConnectionLimits, waiting_bytes
from daemon.wire.fair_queue import FairQueue
from daemon.wire.messages import MAGIC, Answer, Hello, ResultsSince, results_answer, split_envelope
from daemon.wire.socket_thread import Binding, Mailbox, Socket, SocketThread
from daemon.wire.sockets import ServerKeys

#: Limits of a turn, in messages, bytes and time: replies of the writer never wait behind a flood. It reads
#: more than it serves, since libzmq serves unread messages connection by connection, and a flood may have many of them.
_MESSAGES_PER_TURN = 32
_BYTES_PER_TURN = 2 * 2**20
_TURN_S = 0.001
#: Messages that were read and wait for their turn, fairest first. Beyond half of the memory for images the least fair
#: wait without their payloads, for a `busy`: a publisher that waits for answers sends nothing meanwhile. Beyond this
#: number they get it at once.
_WAITING_MESSAGES = 20_000
#: Refusals per second, and in one burst: a flood that waits for its answers gets no faster than this.
_REFUSALS_PER_S = 2000.0
_REFUSALS_AT_ONCE = 64
_PACED_POLL_MS = 1
#: A message that follows others within this time waits for those behind it, unless a small burst came at once: an
#: image costs half as much processor time if several are read together.
_READ_EVERY_S = 0.025
_SMALL_BURST = 16
_CROWDED = "too many messages wait before this one"
_CROWDED_RETRY_MS = 100
_STOPS = "the daemon stops: send again once it has started anew"
_STOPPED_RETRY_MS = 1000
_NO_PAGE = "the results cannot be read now, or answers to earlier questions have not been read: read those first"
_NO_PAGE_RETRY_MS = 500
#: A peer with more bytes of answers unread in the kernel gets no more pages: they would fill the memory. Of an ipc
#: socket the kernel takes 53 kB at a time.
_UNREAD_BYTES = 32 * 1024
_SCANNER_STOP_S = 1.0
#: A pause, so that repeated failures do not fill the log.
_FAILED_TURN_S = 0.05
#: Answers that may wait for a peer that does not read. Further ones are dropped; that peer sends again or is gone.
_ANSWERS_PER_PEER = 10_000
#: Messages of one peer that libzmq reads ahead of the intake. Few, because one may be four payloads long.
_MESSAGES_PER_PEER = 2
#: A connection may always send at least this much of an unfinished message.
_MIN_UNFINISHED_BYTES = 64 * 2**20


#: A message, or the rejection of a malformed one. With None for a payload there was no memory: answer `busy`.
_Waiting = tuple[Peer, Image | Generation | Hello | Answer, bytes | None]


def _sharers(peer: Peer, message: Image | Generation | Hello | Answer) -> Sequence[Hashable]:
    """Return the names whose shares a message counts towards: its connection and its source."""
    source = None if isinstance(message, Answer) else message.source
    return (peer[0],) if source is None else (peer[0], source)


class Intake:
    """Answers every message exactly once. `start` and `stop` are called once each, from another thread."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        endpoints: Sequence[str],
        admission: Admission,
        results_since: ResultsReader,
        keys: ServerKeys | None = None,
        on_answers: Callable[[list[Answer]], None] = lambda _answers: None,
        is_allowed: Callable[[str], bool] | None = None,
        max_connections: int = 256,
    ) -> None:
        """`results_since(seq, limit)` is called in a thread of its own; `on_answers` counts answers.

        `is_allowed(key)` tells if a client's public key is still allowed; None if clients need no key.
        """
        self._admission = admission
        self._on_answers = on_answers
        self._sent: list[Answer] = []
        self._is_allowed = is_allowed
        self._mailbox: Mailbox[Reply | Callable[[], None]] = Mailbox()
        self._catch_ups = CatchUps(results_since)
        self._scanner: Worker[Callable[[], None]] = Worker("payload-scanner", lambda scan: scan())
        admission.post, admission.scan_elsewhere = self._mailbox.put, self._scanner.give_order
        self._waiting: FairQueue[_Waiting] = FairQueue()
        self._may_refuse = float(_REFUSALS_AT_ONCE)
        self._refused_at_s = time.monotonic()
        self._burst, self._burst_at_s = 0, 0.0  # messages that were read without a pause, and since when
        self._stop_by_s: float | None = None
        #: Answers that could not be sent: the peer was gone, or had 10,000 unread.
        self.dropped_answers = 0
        self._log = structlog.get_logger("intake")
        unfinished_bytes = max(4 * admission.limits.max_payload_bytes, _MIN_UNFINISHED_BYTES)
        limits = ConnectionLimits(max_connections, unfinished_bytes)
        binding = Binding(context, zmq.ROUTER, list(endpoints), limits, keys)
        self._thread = SocketThread("intake", binding, self._mailbox, self._configure, self._run)

    def start(self) -> list[str]:
        return self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Take no more messages, wait at most `timeout_s` for the writer's replies, and close."""
        self._stop_by_s = time.monotonic() + timeout_s
        self._thread.stop()

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback` between two messages in the intake thread: proof that the thread is alive."""
        self._mailbox.put(callback)

    def rebind(self, keys: ServerKeys) -> None:
        self._thread.rebind(keys, self.call)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    def _configure(self, router: Socket) -> None:
        router.maxmsgsize = 4 * self._admission.limits.max_payload_bytes
        router.rcvhwm = _MESSAGES_PER_PEER
        router.sndhwm = _ANSWERS_PER_PEER
        router.router_mandatory = True  # an answer that cannot be sent raises, and is counted
        router.router_handover = True  # a camera that comes back under its name is not locked out by its old self

    def _run(self, router: Socket) -> None:
        self._catch_ups.start()
        self._scanner.start()
        try:
            self._serve(router)
        finally:
            self._catch_ups.stop()
            self._scanner.stop(_SCANNER_STOP_S)

    def _serve(self, router: Socket) -> None:
        replies, poller = zmq.Poller(), zmq.Poller()
        poller.register(router, zmq.POLLIN)
        for each in (replies, poller):
            each.register(self._mailbox.fileno(), zmq.POLLIN)
        while self._stop_by_s is None:
            try:
                self._wait(router, poller, replies)
                self._turn(router)
            except Exception:  # noqa: BLE001 - one message must not stop the line
                self._log.exception("intake_turn_failed")
                time.sleep(_FAILED_TURN_S)
        while len(self._waiting):
            peer, message, _ = self._waiting.take_next()
            self._refuse(router, peer, message, _STOPS, _STOPPED_RETRY_MS)
        poller.unregister(router)
        while self._admission.in_flight and (left_s := self._stop_by_s - time.monotonic()) > 0:
            poller.poll(int(left_s * 1000) + 1)
            self._send_replies(router)

    def _wait(self, router: Socket, poller: zmq.Poller, replies: zmq.Poller) -> None:
        """Wait for work. Let messages that arrive one by one gather; send replies at once."""
        if len(self._waiting):
            poller.poll(0 if self._earn_refusals() else _PACED_POLL_MS)
            return
        if poller.poll(_PACED_POLL_MS):
            return
        burst, until_s = self._burst, self._burst_at_s + _READ_EVERY_S
        self._burst = 0
        if burst < _SMALL_BURST:
            while self._stop_by_s is None and (left_s := until_s - time.monotonic()) > 0:
                if replies.poll(int(left_s * 1000) + 1):
                    self._send_replies(router)
        if self._stop_by_s is None:
            poller.poll(None)
        self._burst_at_s = time.monotonic()

    def _turn(self, router: Socket) -> None:
        self._send_replies(router)
        self._read_messages(router)
        self._carry_out(router)
        self._count_answers()

    def _count_answers(self) -> None:
        if self._sent:
            self._on_answers(self._sent)
            self._sent = []

    def _read_messages(self, router: Socket) -> None:
        """Read what has arrived, so that fairness, not the number of connections, decides which message comes next."""
        room = _BYTES_PER_TURN
        for _ in range(_MESSAGES_PER_TURN):
            try:
                frames, fd = self._thread.guard.receive(router, self._is_allowed)
            except zmq.Again:
                return
            self._burst += 1
            if frames is not None:
                self._read(router, frames, fd)
                room -= len(frames[-1])
            if room < 0:
                return

    def _read(self, router: Socket, frames: list[bytes], fd: int) -> None:
        envelope, body = split_envelope(frames[1:])
        peer = (frames[0], *envelope)
        read = self._admission.read(body)
        message, payload = (read, b"") if isinstance(read, Answer) else read
        if isinstance(message, ResultsSince):
            self._catch_up(router, peer, message, fd)
            return
        self._waiting.add(_sharers(peer, message), (peer, message, payload), len(payload))
        while self._waiting.bytes > max(len(payload), self._admission.limits.in_memory // 2):
            self._waiting.drop_payload(lambda waiting: (*waiting[:2], None))
        if len(self._waiting) > _WAITING_MESSAGES:
            peer, message, _ = self._waiting.shed()
            self._refuse(router, peer, message, _CROWDED, _CROWDED_RETRY_MS)

    def _carry_out(self, router: Socket) -> None:
        until_s = time.monotonic() + _TURN_S
        while len(self._waiting) and self._earn_refusals():
            peer, message, payload = self._waiting.take_next()
            if payload is None or isinstance(message, Answer):
                self._may_refuse -= 1
                self._refuse(router, peer, message, _CROWDED, _CROWDED_RETRY_MS)
            elif (answer := self._admission.admit_message(peer, message, payload)) is not None:
                self._may_refuse -= 1
                self._send(router, peer, answer)
            if time.monotonic() > until_s:
                return

    def _earn_refusals(self) -> bool:
        now_s = time.monotonic()
        earned = (now_s - self._refused_at_s) * _REFUSALS_PER_S
        self._refused_at_s = now_s
        self._may_refuse = min(_REFUSALS_AT_ONCE, self._may_refuse + earned)
        return self._may_refuse >= 1

    def _refuse(
        self,
        router: Socket,
        peer: Peer,
        message: Image | Generation | Hello | Answer,
        reason: str,
        retry_after_ms: int,
    ) -> None:
        busy = message if isinstance(message, Answer) else self._admission.busy(message, reason, retry_after_ms)
        self._send(router, peer, busy)

    def _send_replies(self, router: Socket) -> None:
        for reply in self._mailbox.take_all():
            try:
                answers = reply() or ()
            except Exception:  # noqa: BLE001 - a defect costs one answer, not the line
                self._log.exception("reply_failed")
                continue
            for peer, answer in answers:
                self._send(router, peer, answer)
        self._count_answers()

    def _send(self, router: Socket, peer: Peer, answer: Answer) -> None:
        self._sent.append(answer)
        try:
            router.send_multipart([*peer, MAGIC, answer.header], zmq.NOBLOCK)
        except zmq.ZMQError:  # the peer is gone, or does not read: it will send again
            self.dropped_answers += 1

    def _catch_up(self, router: Socket, peer: Peer, question: ResultsSince, fd: int) -> None:
        def is_reading() -> bool:
            return waiting_bytes(fd, termios.TIOCOUTQ) <= _UNREAD_BYTES

        def done(page: Page | None) -> None:
            if page is None:
                answer = self._admission.busy(question, _NO_PAGE, _NO_PAGE_RETRY_MS)
            else:
                answer = results_answer(question, page, self._admission.credit(question.source))
            self._mailbox.put(lambda: [(peer, answer)])

        if not self._catch_ups.ask(peer[0].hex(), question, is_reading, done):
            self._send(
                router, peer, self._admission.busy(question, "too many results_since wait for their answers", 50)
            )
