"""The publish thread: owns the PUB socket, sends results in the order of their `seq`, and a heartbeat every second.

Nothing waits for a slow subscriber: it loses messages, sees the gap in `seq` and asks `results_since`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
import zmq

from daemon.records import Generation, Message
from daemon.storage.database.rows import topic
from daemon.units import utc_text
from daemon.wire.connection_guard import ConnectionLimits
from daemon.wire.messages import encode
from daemon.wire.socket_thread import Binding, Mailbox, Socket, SocketThread
from daemon.wire.sockets import ServerKeys

HEARTBEAT_TOPIC = b"heartbeat/"
_HEARTBEAT_S = 1.0
#: Messages that wait for one subscriber; beyond it that subscriber loses the newest.
_MESSAGES_PER_SUBSCRIBER = 10_000
#: A subscriber sends subscriptions only: the longest topic is an inspection's, 796 bytes.
_MAX_SUBSCRIPTION_BYTES = 1024
#: Of each connection, before the guard's next check: in libzmq's queue (with 1, subscribers got nothing more after a
#: rebind), and in the kernel's buffer.
_WAITING_SUBSCRIPTIONS, _RECEIVE_BUFFER_BYTES = 16, 4096
#: What a subscriber may send in all; libzmq keeps fifty bytes and more for each byte of a subscription.
_SUBSCRIPTION_BYTES = 16 * 1024
#: A handshake, with CURVE, and a few subscriptions, which are not counted.
_HANDSHAKE_BYTES = 1024
#: ZMTP heartbeats of a subscriber, which are not counted.
_HEARTBEAT_BYTES_PER_S = 32


class ResultsStream:
    """Publishes durable results, and a heartbeat with the line's state and backlog."""

    _heartbeat: Callable[[], tuple[str, int]]

    def __init__(
        self,
        context: "zmq.Context[Any]",
        endpoint: str,
        last_seq: int,
        keys: ServerKeys | None = None,
        max_connections: int = 64,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        """`identity` is `line` and `epoch`, for each heartbeat."""
        self._identity = identity or {}
        #: The newest `seq` that was sent, or that was in the database at the start.
        self.last_seq = last_seq
        self._mailbox: Mailbox[Message | Callable[[Socket], object]] = Mailbox()
        self._stopping = False
        self._started_at_s = time.monotonic()
        self._log = structlog.get_logger("publish")
        limits = ConnectionLimits(
            max_connections, _SUBSCRIPTION_BYTES, free_bytes=_HANDSHAKE_BYTES, idle_bytes_per_s=_HEARTBEAT_BYTES_PER_S
        )
        binding = Binding(context, zmq.PUB, [endpoint], limits, keys)
        self._thread = SocketThread("publish", binding, self._mailbox, _configure, self._serve)

    def start(self, heartbeat: Callable[[], tuple[str, int]]) -> str:
        """Bind, begin to send, and return the endpoint. `heartbeat` returns the line's state and its backlog."""
        self._heartbeat = heartbeat
        return self._thread.start()[0]

    def publish(self, messages: Sequence[Message]) -> None:
        """Send durable `messages` in the order of their `seq` and of the calls. Any thread."""
        for message in messages:
            self._mailbox.put(message)

    def publish_token(self, request: Generation, index: int, text: str) -> None:
        """Send a piece of a text while it is generated; its message repeats the last `seq`."""

        def send(pub: Socket) -> None:
            body = {"seq": self.last_seq, "at": utc_text(time.time()), "id": request.request_id}
            body |= {"source": request.source, "index": index, "text": text}
            pub.send_multipart([topic("token", request.source).encode("ascii"), encode(body)])

        self._mailbox.put(send)

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the publish thread, after the messages before it are sent (pipeline_probe.py)."""
        self._mailbox.put(lambda _pub: callback())

    def rebind(self, keys: ServerKeys) -> None:
        """Cut every subscriber over an open endpoint: those that are still allowed reconnect, and see the gap."""
        self._thread.rebind(keys, self.call)

    def stop(self) -> None:
        self._stopping = True
        self._thread.stop()

    def _serve(self, pub: Socket) -> None:
        poller = zmq.Poller()
        poller.register(self._mailbox.fileno(), zmq.POLLIN)
        beat_at_s = time.monotonic()
        while not self._stopping:
            now_s = time.monotonic()
            if now_s >= beat_at_s:
                self._beat(pub, now_s)
                beat_at_s = max(beat_at_s + _HEARTBEAT_S, now_s)
            poller.poll(max(1, int((beat_at_s - time.monotonic()) * 1000)))
            self._send_all(pub)
        self._send_all(pub)

    def _send_all(self, pub: Socket) -> None:
        for message in self._mailbox.take_all():
            if callable(message):
                message(pub)
                continue
            try:
                pub.send_multipart([message.topic.encode("ascii"), encode(message.body)])
            except Exception as error:  # noqa: BLE001 - not JSON, for example: consumers see the gap, the stream goes on
                self._log.error("message_not_published", seq=message.seq, error=str(error))
            self.last_seq = max(self.last_seq, message.seq)

    def _beat(self, pub: Socket, now_s: float) -> None:
        try:
            state, backlog = self._heartbeat()
        except Exception:  # noqa: BLE001 - results go on without a heartbeat
            self._log.exception("heartbeat_failed")
            return
        body = {
            "seq": self.last_seq,
            "at": utc_text(time.time()),
            "state": state,
            "backlog": backlog,
            "uptime_s": round(now_s - self._started_at_s, 3),
            **self._identity,
        }
        pub.send_multipart([HEARTBEAT_TOPIC, encode(body)])


def _configure(pub: Socket) -> None:
    pub.sndhwm = _MESSAGES_PER_SUBSCRIBER
    pub.maxmsgsize = _MAX_SUBSCRIPTION_BYTES
    pub.rcvhwm = _WAITING_SUBSCRIPTIONS
    pub.rcvbuf = _RECEIVE_BUFFER_BYTES
