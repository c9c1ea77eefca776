"""The intake thread: owns the ROUTER socket, hands messages to `Admission` and its answers back to the peers.

Catching-up consumers are served by a second, small thread: their long queries must not delay anybody's acceptance.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import zmq

from daemon.admission import Admission, Peer, Settled
from daemon.frames import MAGIC, split_envelope
from daemon.mailbox import Mailbox
from daemon.messages import Answer, ResultsSince, results_answer
from daemon.socket_thread import Binding, Socket, SocketThread
from daemon.sockets import ServerKeys, keep_alive

#: Messages taken per turn, so that replies of the writer are never kept waiting behind a flood.
_MESSAGES_PER_TURN = 64
#: Answers that wait for a peer that does not read. Beyond it they are dropped; that peer sends again or is gone.
_ANSWERS_PER_PEER = 10_000
#: Messages of one peer that are read ahead of the intake. Small, for one may be four payloads long.
_MESSAGES_PER_PEER = 64
_CATCH_UPS_PER_PEER = 1000


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
        results_since: Callable[[int, int], Mapping[str, Any]],
        keys: ServerKeys | None = None,
        on_answer: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`results_since(seq, limit)` is called in a thread of its own; `on_answer` counts answers by type."""
        self._admission = admission
        self._results_since = results_since
        self._on_answer = on_answer
        self._mailbox: Mailbox[Settled | _CaughtUp] = Mailbox()
        self._catch_ups: queue.Queue[tuple[Peer, ResultsSince] | None] = queue.Queue()
        self._catching_up: Counter[bytes] = Counter()
        self._stop_by_s: float | None = None
        self._dropped_answers = 0
        self._log = structlog.get_logger("intake")
        binding = Binding(context, zmq.ROUTER, list(endpoints), keys)
        self._thread = SocketThread("intake", binding, self._mailbox, self._configure, self._run)
        self._catch_up_thread = threading.Thread(target=self._serve_catch_ups, name="intake-results")

    def start(self) -> list[str]:
        """Bind and begin to answer. The endpoints as bound, ports filled in; StartError where that fails."""
        return self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Take no more messages, wait at most `timeout_s` for the writer's replies to those taken, and close."""
        self._stop_by_s = time.monotonic() + timeout_s
        self._thread.stop()

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
        self._catch_up_thread.start()
        try:
            self._serve(router)
        finally:
            self._catch_ups.put(None)
            self._catch_up_thread.join()

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
        for _ in range(_MESSAGES_PER_TURN):
            try:
                identity, *frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            envelope, body = split_envelope(frames)
            peer = Peer(identity, tuple(envelope))
            answer = self._admission.take(peer, body, self._mailbox.put)
            if isinstance(answer, ResultsSince):
                answer = self._catch_up(peer, answer)
            if answer is not None:
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

    def _open_letter(self, letter: Settled | _CaughtUp) -> list[tuple[Peer, Answer]]:
        if isinstance(letter, Settled):
            return self._admission.settle(letter)
        self._catching_up[letter.peer.identity] -= 1
        if not self._catching_up[letter.peer.identity]:
            del self._catching_up[letter.peer.identity]
        return [(letter.peer, letter.answer)]

    def _send(self, router: Socket, peer: Peer, answer: Answer) -> None:
        self._on_answer(answer.kind)
        try:
            router.send_multipart([peer.identity, *peer.envelope, MAGIC, answer.header], zmq.NOBLOCK)
        except zmq.ZMQError:  # no such peer any more, or it does not read: it will send again
            self._dropped_answers += 1

    def _catch_up(self, peer: Peer, asked: ResultsSince) -> Answer | None:
        if self._catching_up[peer.identity] >= _CATCH_UPS_PER_PEER:
            return self._admission.busy(asked, "wait for the answers to your other results_since", 50)
        self._catching_up[peer.identity] += 1
        self._catch_ups.put((peer, asked))
        return None

    def _serve_catch_ups(self) -> None:
        while (job := self._catch_ups.get()) is not None:
            peer, asked = job
            try:
                page = self._results_since(asked.seq, asked.limit)
                answer = results_answer(asked, page, self._admission.credit(asked))
            except Exception:  # noqa: BLE001 - a failed query is the asker's to repeat
                self._log.exception("results_since_failed", seq=asked.seq)
                answer = self._admission.busy(asked, "the results cannot be read now", 500)
            self._mailbox.put(_CaughtUp(peer, answer))
