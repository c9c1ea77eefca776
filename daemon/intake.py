"""The intake thread: owns the ROUTER socket, hands messages to `Admission` and its answers back to the peers.

What takes long is other threads' work, so that nobody's acceptance waits for it: catching-up consumers (catch_up.py),
and a look at large payloads (examine.py).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import zmq

from daemon.admission import Admission, Looked, Peer, Settled
from daemon.catch_up import CatchUps, Page, ResultsReader
from daemon.examine import Examination, Examiner
from daemon.frames import MAGIC, split_envelope
from daemon.mailbox import Mailbox
from daemon.messages import Answer, ResultsSince, results_answer
from daemon.socket_thread import Binding, Socket, SocketThread
from daemon.sockets import ServerKeys, keep_alive, receive

#: Messages taken per turn, and for how long: replies of the writer are never kept waiting behind a flood.
_MESSAGES_PER_TURN = 64
_TURN_S = 0.002
#: Answers that wait for a peer that does not read. Beyond it they are dropped; that peer sends again or is gone.
_ANSWERS_PER_PEER = 10_000
#: Messages of one peer that are read ahead of the intake. Few, for one may be four payloads long.
_MESSAGES_PER_PEER = 4


@dataclass(frozen=True, slots=True)
class _CaughtUp:
    peer: Peer
    answer: Answer


class Intake:
    """Answers every message exactly once, and outlives every message. `start` and `stop` once each, from outside."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        endpoints: Sequence[str],
        admission: Admission,
        results_since: ResultsReader,
        keys: ServerKeys | None = None,
        on_answer: Callable[[str], None] = lambda _: None,
        may_in: Callable[[str], bool] | None = None,
    ) -> None:
        """`results_since(seq, limit)` is called in a thread of its own; `on_answer` counts answers by type.

        `may_in` says whether a client's public key is still allowed in; None where nobody needs one.
        """
        self._admission = admission
        self._on_answer = on_answer
        self._may_in = may_in
        self._mailbox: Mailbox[Settled | Looked | _CaughtUp | Callable[[], None]] = Mailbox()
        self._catch_ups = CatchUps(results_since)
        self._examiner = Examiner()
        self._stop_by_s: float | None = None
        self._dropped_answers = 0
        self._log = structlog.get_logger("intake")
        binding = Binding(context, zmq.ROUTER, list(endpoints), keys)
        self._thread = SocketThread("intake", binding, self._mailbox, self._configure, self._run)

    def start(self) -> list[str]:
        """Bind and begin to answer. The endpoints as bound, ports filled in; StartError where that fails."""
        return self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Take no more messages, wait at most `timeout_s` for the writer's replies to those taken, and close."""
        self._stop_by_s = time.monotonic() + timeout_s
        self._thread.stop()

    def call(self, callback: Callable[[], None]) -> None:
        """Have `callback` called between two messages, in the intake thread: proof that it goes on (pulse.py)."""
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
        router.router_mandatory = True  # so that an answer which cannot go out is seen, and counted
        router.router_handover = True  # a camera that comes back under its name is not locked out by its old self
        keep_alive(router)

    def _run(self, router: Socket) -> None:
        self._catch_ups.start()
        self._examiner.start()
        try:
            self._serve(router)
        finally:
            self._catch_ups.stop()
            self._examiner.stop()

    def _serve(self, router: Socket) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._mailbox.fileno(), zmq.POLLIN)
        while self._stop_by_s is None:
            poller.poll()
            self._send_replies(router)
            self._take_messages(router)
        poller.unregister(router)
        while self._admission.in_flight and (left_s := self._stop_by_s - time.monotonic()) > 0:
            poller.poll(int(left_s * 1000) + 1)
            self._send_replies(router)

    def _take_messages(self, router: Socket) -> None:
        until_s = time.monotonic() + _TURN_S
        for _ in range(_MESSAGES_PER_TURN):
            if time.monotonic() > until_s:
                return
            try:
                message = receive(router, self._may_in)
            except zmq.Again:
                return
            if message is None:
                continue
            identity, *frames = message
            envelope, body = split_envelope(frames)
            peer = Peer(identity, tuple(envelope))
            answer = self._admission.take(peer, body, self._mailbox.put)
            if isinstance(answer, Examination):
                self._examiner.submit(answer)
            elif isinstance(answer, ResultsSince):
                self._catch_up(router, peer, answer)
            elif answer is not None:
                self._send(router, peer, answer)

    def _send_replies(self, router: Socket) -> None:
        for letter in self._mailbox.take_all():
            try:
                answers = self._open_letter(letter)
            except Exception:  # noqa: BLE001 - books that do not add up cost one answer, not the line
                self._log.exception("reply_failed")
                continue
            for peer, answer in answers:
                self._send(router, peer, answer)

    def _open_letter(self, letter: Settled | Looked | _CaughtUp | Callable[[], None]) -> list[tuple[Peer, Answer]]:
        if callable(letter):
            letter()
            return []
        if isinstance(letter, Settled):
            return self._admission.settle(letter)
        if isinstance(letter, Looked):
            answer = self._admission.looked(letter, self._mailbox.put)
            return [] if answer is None else [(letter.peer, answer)]
        return [(letter.peer, letter.answer)]

    def _send(self, router: Socket, peer: Peer, answer: Answer) -> None:
        self._on_answer(answer.kind)
        try:
            router.send_multipart([peer.identity, *peer.envelope, MAGIC, answer.header], zmq.NOBLOCK)
        except zmq.ZMQError:  # no such peer any more, or it does not read: it will send again
            self._dropped_answers += 1

    def _catch_up(self, router: Socket, peer: Peer, asked: ResultsSince) -> None:
        def done(page: Page | None) -> None:
            if page is None:
                answer = self._admission.busy(asked, "the results cannot be read now", 500)
            else:
                answer = results_answer(asked, page, self._admission.credit(asked))
            self._mailbox.put(_CaughtUp(peer, answer))

        if not self._catch_ups.ask(peer.identity.hex(), asked, done):
            self._send(router, peer, self._admission.busy(asked, "too many results_since wait for their answers", 50))
