"""The intake thread: owns the ROUTER socket, hands messages to `Admission` and its answers back to the peers.

What takes long is other threads' work, so that nobody's acceptance waits for it: catching-up consumers (catch_up.py),
and a look at large payloads (payload_scan.py).
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
import zmq

from daemon.intake.admission import Admission, Looked, Posted, Settled
from daemon.intake.backlog import Peer
from daemon.intake.catch_up import CatchUps, Page, ResultsReader
from daemon.intake.connection_guard import ConnectionGuard
from daemon.intake.payload_scan import Examination, PayloadScanner
from daemon.intake.text_requests import TextSettled
from daemon.policy.fair_queue import FairQueue
from daemon.wire.messages import MAGIC, Answer, Generate, Hello, Inspect, ResultsSince, results_answer, split_envelope
from daemon.wire.socket_thread import Binding, Mailbox, Socket, SocketThread
from daemon.wire.sockets import ServerKeys, keep_alive, receive

#: A turn reads so much, and carries out as long as this: replies of the writer never wait behind a flood. It reads more
#: than it carries out, since what was not read is served connection by connection, and a flood may have many of them.
_MESSAGES_PER_TURN = 32
_BYTES_PER_TURN = 8 * 2**20
_TURN_S = 0.001
#: Messages that were read and wait for their turn, fairest first. Beyond half of the memory for images the least fair
#: wait without their payloads, for a `busy`: whoever waits for answers sends nothing meanwhile. Beyond this number they
#: hear it at once.
_WAITING_MESSAGES = 20_000
#: Answers to what was not taken, per second and at once: a flood that waits for its answers gets no faster than this.
_REFUSALS_PER_S = 2000.0
_REFUSALS_AT_ONCE = 64
_PACED_POLL_MS = 1
_CROWDED = "too many messages wait before this one"
_CROWDED_RETRY_MS = 100
_STOPPED_RETRY_MS = 1000
#: So that what fails again and again does not fill the log.
_FAILED_TURN_S = 0.05
#: Answers that wait for a peer that does not read. Beyond it they are dropped; that peer sends again or is gone.
_ANSWERS_PER_PEER = 10_000
#: Messages of one peer that libzmq reads ahead of the intake. Few, for one may be four payloads long.
_MESSAGES_PER_PEER = 2
#: Who has not finished its handshake by then is cut off: a connection costs a file handle.
_HANDSHAKE_MS = 5000


@dataclass(frozen=True, slots=True)
class _CaughtUp:
    peer: Peer
    answer: Answer


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A message that was read. `payload` is None where there was no room for it: a `busy` waits in its place."""

    peer: Peer
    message: Inspect | Generate | Hello
    payload: bytes | None

    @property
    def names(self) -> Sequence[Hashable]:
        """By what fairness knows the sender: connection and source."""
        source = self.message.source
        return (self.peer.identity,) if source is None else (self.peer.identity, source)


class Intake:
    """Answers every message exactly once, and outlives every message. `start` and `stop` once each, from outside."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        endpoints: Sequence[str],
        admission: Admission,
        results_since: ResultsReader,
        keys: ServerKeys | None = None,
        on_answer: Callable[[str, str | None], None] = lambda _kind, _code: None,
        may_in: Callable[[str], bool] | None = None,
    ) -> None:
        """`results_since(seq, limit)` is called in a thread of its own; `on_answer` counts answers by type and code.

        `may_in` says whether a client's public key is still allowed in; None where nobody needs one.
        """
        self._admission = admission
        self._on_answer = on_answer
        self._may_in = may_in
        self._mailbox: Mailbox[Posted | _CaughtUp | Callable[[], None]] = Mailbox()
        self._catch_ups = CatchUps(results_since)
        self._examiner = PayloadScanner()
        self._connection_guard = ConnectionGuard(context, 4 * admission.limits.max_payload_bytes)
        self._waiting: FairQueue[_Waiting] = FairQueue()
        self._refusals: FairQueue[tuple[Peer, Answer]] = FairQueue()
        self._may_refuse = float(_REFUSALS_AT_ONCE)
        self._refused_at_s = time.monotonic()
        self._stop_by_s: float | None = None
        self._dropped_answers = 0
        self._log = structlog.get_logger("intake")
        binding = Binding(context, zmq.ROUTER, list(endpoints), keys)
        self._thread = SocketThread("intake", binding, self._mailbox, self._configure, self._run)

    def start(self) -> list[str]:
        """Bind and begin to answer. The endpoints as bound, ports filled in; StartError where that fails."""
        try:
            return self._thread.start()
        except BaseException:
            self._connection_guard.abandon()
            raise

    def stop(self, timeout_s: float = 5.0) -> None:
        """Take no more messages, wait at most `timeout_s` for the writer's replies to those taken, and close."""
        self._stop_by_s = time.monotonic() + timeout_s
        self._thread.stop()

    def call(self, callback: Callable[[], None]) -> None:
        """Have `callback` called between two messages, in the intake thread: proof that it goes on."""
        self._mailbox.put(callback)

    def rebind(self, keys: ServerKeys) -> None:
        """Cut every connection over an open endpoint: those who may in come back by themselves."""
        self._thread.rebind(keys, self.call)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    @property
    def dropped_answers(self) -> int:
        """Answers that nobody took: the peer was gone, or had left 10,000 unread."""
        return self._dropped_answers

    def _configure(self, router: Socket) -> None:
        router.maxmsgsize = 4 * self._admission.limits.max_payload_bytes
        router.rcvhwm = _MESSAGES_PER_PEER
        router.sndhwm = _ANSWERS_PER_PEER
        router.handshake_ivl = _HANDSHAKE_MS
        router.router_mandatory = True  # so that an answer which cannot go out is seen, and counted
        router.router_handover = True  # a camera that comes back under its name is not locked out by its old self
        keep_alive(router)
        self._connection_guard.watch(router)

    def _run(self, router: Socket) -> None:
        self._catch_ups.start()
        self._examiner.start()
        self._connection_guard.start()
        try:
            self._serve(router)
        finally:
            self._connection_guard.stop(router)
            self._catch_ups.stop()
            self._examiner.stop()

    def _serve(self, router: Socket) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._mailbox.fileno(), zmq.POLLIN)
        while self._stop_by_s is None:
            poller.poll(0 if len(self._waiting) else _PACED_POLL_MS if len(self._refusals) else None)
            try:
                self._turn(router)
            except Exception:  # noqa: BLE001 - whatever it was, the next message is another one
                self._log.exception("intake_turn_failed")
                time.sleep(_FAILED_TURN_S)
        self._refuse_waiting(router)
        poller.unregister(router)
        while self._admission.in_flight and (left_s := self._stop_by_s - time.monotonic()) > 0:
            poller.poll(int(left_s * 1000) + 1)
            self._send_replies(router)

    def _turn(self, router: Socket) -> None:
        self._send_replies(router)
        self._read_messages(router)
        self._carry_out(router)
        self._send_refusals(router)

    def _read_messages(self, router: Socket) -> None:
        """Read what is there: whose message comes next is for us to say, not for the number of connections."""
        room = _BYTES_PER_TURN
        for _ in range(_MESSAGES_PER_TURN):
            try:
                frames = receive(router, self._may_in, self._connection_guard.delivered)
            except zmq.Again:
                return
            if frames is not None:
                self._read(router, frames)
                room -= len(frames[-1])
            if room < 0:
                return

    def _read(self, router: Socket, frames: list[bytes]) -> None:
        envelope, body = split_envelope(frames[1:])
        peer = Peer(frames[0], tuple(envelope))
        read = self._admission.read(body)
        if isinstance(read, Answer):
            self._refuse(router, (peer.identity,), peer, read)
            return
        message, payload = read
        if isinstance(message, ResultsSince):
            self._catch_up(router, peer, message)
            return
        waiting = _Waiting(peer, message, payload)
        self._waiting.add(waiting.names, waiting, len(payload))
        while self._waiting.bytes > max(len(payload), self._admission.limits.in_memory_bytes // 2):
            self._waiting.lighten(lambda waiting: replace(waiting, payload=None))
        if len(self._waiting) > _WAITING_MESSAGES:
            self._crowd_out(router, self._waiting.shed())

    def _carry_out(self, router: Socket) -> None:
        until_s = time.monotonic() + _TURN_S
        while len(self._waiting):
            waiting = self._waiting.take()
            if waiting.payload is None:
                self._crowd_out(router, waiting)
            else:
                self._admit(router, waiting, waiting.payload)
            if time.monotonic() > until_s:
                return

    def _admit(self, router: Socket, waiting: _Waiting, payload: bytes) -> None:
        answer = self._admission.take(waiting.peer, waiting.message, payload, self._mailbox.put)
        if isinstance(answer, Examination):
            self._examiner.submit(answer)
        elif answer is not None:
            self._refuse(router, waiting.names, waiting.peer, answer)

    def _crowd_out(self, router: Socket, waiting: _Waiting) -> None:
        answer = self._admission.busy(waiting.message, _CROWDED, _CROWDED_RETRY_MS)
        self._refuse(router, waiting.names, waiting.peer, answer)

    def _refuse(self, router: Socket, names: Sequence[Hashable], peer: Peer, answer: Answer) -> None:
        """Send an answer to what was not taken, in fair order; at once while they are few."""
        self._refusals.add(names, (peer, answer), 0)
        if len(self._refusals) > _WAITING_MESSAGES:
            self._send(router, *self._refusals.shed())

    def _send_refusals(self, router: Socket) -> None:
        now_s = time.monotonic()
        earned = (now_s - self._refused_at_s) * _REFUSALS_PER_S
        self._refused_at_s = now_s
        self._may_refuse = min(_REFUSALS_AT_ONCE, self._may_refuse + earned)
        while len(self._refusals) and self._may_refuse >= 1:
            self._may_refuse -= 1
            self._send(router, *self._refusals.take())

    def _refuse_waiting(self, router: Socket) -> None:
        """What was read and not begun when the daemon stops."""
        while len(self._refusals):
            self._send(router, *self._refusals.take())
        while len(self._waiting):
            waiting = self._waiting.take()
            reason = "the daemon stops: send again once it has started anew"
            self._send(router, waiting.peer, self._admission.busy(waiting.message, reason, _STOPPED_RETRY_MS))

    def _send_replies(self, router: Socket) -> None:
        for letter in self._mailbox.take_all():
            try:
                answers = self._open_letter(letter)
            except Exception:  # noqa: BLE001 - books that do not add up cost one answer, not the line
                self._log.exception("reply_failed")
                continue
            for peer, answer in answers:
                self._send(router, peer, answer)

    def _open_letter(self, letter: Posted | _CaughtUp | Callable[[], None]) -> list[tuple[Peer, Answer]]:
        if callable(letter):
            letter()
            return []
        if isinstance(letter, Settled):
            return self._admission.settle(letter)
        if isinstance(letter, TextSettled):
            return self._admission.settle_text(letter)
        if isinstance(letter, Looked):
            answer = self._admission.looked(letter, self._mailbox.put)
            return [] if answer is None else [(letter.peer, answer)]
        return [(letter.peer, letter.answer)]

    def _send(self, router: Socket, peer: Peer, answer: Answer) -> None:
        self._on_answer(answer.kind, answer.code)
        try:
            router.send_multipart([peer.identity, *peer.envelope, MAGIC, answer.header], zmq.NOBLOCK)
        except zmq.ZMQError:  # no such peer any more, or it does not read: it will send again
            self._dropped_answers += 1

    def _catch_up(self, router: Socket, peer: Peer, asked: ResultsSince) -> None:
        def done(page: Page | None) -> None:
            if page is None:
                answer = self._admission.busy(asked, "the results cannot be read now", 500)
            else:
                answer = results_answer(asked, page, self._admission.credit(asked.source))
            self._mailbox.put(_CaughtUp(peer, answer))

        if not self._catch_ups.ask(peer.identity.hex(), asked, done):
            self._send(router, peer, self._admission.busy(asked, "too many results_since wait for their answers", 50))
