"""A socket that is full of silent connections still takes a new one."""

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from daemon.wire.connection_guard import ConnectionGuard, ConnectionLimits
from tests.contract.peer import Peer
from tests.ports import free_port
from tests.stress.raw import GREETING, RawPeer, frame

pytestmark = pytest.mark.not_fast("waits for sockets")


@contextlib.contextmanager
def an_answering_socket(connections: int) -> Iterator[str]:
    """Yield the endpoint of a ROUTER that answers each message and takes this many connections."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        guard = ConnectionGuard("test", context, ConnectionLimits(connections))
        guard.watch(sock)
        sock.bind(endpoint)
        stopping = threading.Event()

        def answer() -> None:
            while not stopping.is_set():
                while sock.poll(20):
                    (client, *frames), _ = guard.receive(sock, None)
                    sock.send_multipart([client, *frames])
            guard.stop(sock)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield endpoint
        finally:
            stopping.set()
            thread.join()


def answers(endpoint: str) -> bool:
    with Peer(endpoint) as peer:
        peer.send({"type": "x"})
        return bool(peer.socket.poll(3000))


@pytest.mark.promise(
    "Overload and hostile publishers",
    "Connections that finish the handshake and then send nothing make room for new ones",
)
def test_connections_that_never_send_a_message_keep_no_new_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.wire.connection_guard._GRACE_S", 0.5)
    with an_answering_socket(8) as endpoint, contextlib.ExitStack() as stack, Peer(endpoint) as known:
        known.send({"type": "x"})
        assert known.socket.poll(5000)
        known.socket.recv_multipart()
        for number in range(12):
            peer = stack.enter_context(RawPeer(endpoint))
            peer.send(GREETING[:11]) if number % 2 else peer.greet()
        time.sleep(0.6)
        assert all(answers(endpoint) for _ in range(10))
        known.send({"type": "x"})
        assert known.socket.poll(5000), "a connection that sent a message is not cut"


def test_connections_that_sent_one_message_keep_new_ones_out_for_a_minute_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("daemon.wire.connection_guard._QUIET_S", 0.5)
    with an_answering_socket(8) as endpoint, contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(RawPeer(endpoint)).greet().send(frame(b"x", more=False))
        time.sleep(1.0)
        assert all(answers(endpoint) for _ in range(10))
