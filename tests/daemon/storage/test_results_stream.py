"""The results stream over a real socket: topics, and subscribers that do not read."""

import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import zmq

from daemon.records import Message
from daemon.storage.results_stream import ResultsStream
from daemon.wire.sockets import end_context
from tests.stress.raw import RawPeer, frame
from tests.waiting import until

pytestmark = pytest.mark.not_fast("waits for sockets")


def a_message(seq: int, serial: str = "S1", **body: Any) -> Message:
    return Message(seq, f"inspection/mainboard-a/{serial}/", {"seq": seq, **body})


@contextmanager
def a_stream() -> Iterator[tuple[ResultsStream, str]]:
    context: zmq.Context[Any] = zmq.Context()
    stream = ResultsStream(context, "tcp://127.0.0.1:*", 0)
    try:
        yield stream, stream.start(lambda: ("ready", 3))
    finally:
        stream.stop()
        end_context(context)


@contextmanager
def a_subscriber(endpoint: str, topic: str = "", hwm: int = 0) -> Iterator["zmq.Socket[bytes]"]:
    context: zmq.Context[Any] = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.linger = 0
    sub.rcvhwm = hwm
    sub.subscribe(topic)
    sub.connect(endpoint)
    try:
        yield sub
    finally:
        context.destroy(linger=0)


def receive(sub: "zmq.Socket[bytes]") -> tuple[str, dict[str, Any]]:
    assert sub.poll(60_000), "nothing was published"
    topic, body = sub.recv_multipart()
    return topic.decode(), json.loads(body)


def wait_for_heartbeat(sub: "zmq.Socket[bytes]") -> None:
    """The subscription has arrived once a heartbeat has."""
    while receive(sub)[0] != "heartbeat/":
        pass


def test_a_subscription_to_one_serial_is_exact() -> None:
    with a_stream() as (stream, endpoint), a_subscriber(endpoint, "inspection/mainboard-a/S1/") as sub:
        sub.subscribe("heartbeat/")
        wait_for_heartbeat(sub)
        stream.publish([a_message(1, "S11"), a_message(2, "S1"), a_message(3, "S"), a_message(4, "S1")])
        seqs: list[int] = []
        while 4 not in seqs:
            topic, body = receive(sub)
            seqs += [body["seq"]] if topic != "heartbeat/" else []
        assert seqs == [2, 4]


def a_raw_client(endpoint: str) -> socket.socket:
    host, port = endpoint.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_a_subscriber_that_never_finishes_its_handshake_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.wire.socket_thread._HANDSHAKE_MS", 300)
    with a_stream() as (_, endpoint), a_raw_client(endpoint) as silent:
        while silent.recv(100):  # the stream's own greeting, then the end
            pass


def test_a_subscription_that_is_far_too_long_is_cut() -> None:
    with a_stream() as (_, endpoint), a_subscriber(endpoint) as sub:
        wait_for_heartbeat(sub)
        sub.monitor("inproc://events", zmq.EVENT_DISCONNECTED)
        events = sub.context.socket(zmq.PAIR)
        events.connect("inproc://events")
        sub.subscribe("x" * 10_000)
        assert events.poll(30_000), "the stream keeps a connection with a subscription of 10,000 bytes"
        events.close()


def test_a_subscriber_that_never_reads_has_a_bounded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.storage.results_stream._MESSAGES_PER_SUBSCRIBER", 20)
    with a_stream() as (stream, endpoint), a_subscriber(endpoint, hwm=1) as deaf, a_subscriber(endpoint) as reader:
        wait_for_heartbeat(deaf)
        wait_for_heartbeat(reader)
        sent = 400  # 36 MB: more than any socket buffers
        for seq in range(1, sent + 1):
            stream.publish([a_message(seq, text="x" * 90_000)])
            while receive(reader)[1]["seq"] < seq:
                pass
        received = 0
        while deaf.poll(1000):
            topic, _ = deaf.recv_multipart()
            received += topic.startswith(b"inspection/")
        assert 0 < received < sent * 0.9


@pytest.mark.promise(
    "Overload and hostile publishers",
    "Subscribers that never read do not affect the others; subscriptions without end and pages of results that "
    "nobody reads take little memory",
)
def test_subscriptions_without_end_are_cut_off_and_take_little_memory() -> None:
    dice = random.Random(7)
    with a_stream() as (stream, endpoint), a_subscriber(endpoint) as sub, RawPeer(endpoint) as greedy:
        wait_for_heartbeat(sub)
        greedy.greet(b"SUB")
        before_bytes = psutil.Process().memory_info().rss
        sent_bytes = 0
        while sent_bytes < 32 * 2**20 and greedy.send(chunk := subscriptions(dice, 2000)):
            sent_bytes += len(chunk)
        until(greedy.is_cut)
        # Kept whole, 32 MB of subscriptions would be 1.5 GB, here in the process of the stream.
        assert psutil.Process().memory_info().rss - before_bytes < 300 * 2**20
        stream.publish([a_message(1, n="after")])
        while (body := receive(sub)[1]).get("n") != "after":
            pass
        assert body["seq"] == 1


def subscriptions(dice: random.Random, count: int, size: int = 30) -> bytes:
    return b"".join(frame(b"\1" + dice.randbytes(size), more=False) for _ in range(count))


@pytest.mark.promise(
    "Overload and hostile publishers",
    "100 subscribers that send 200-byte topics, and reconnect when they are cut, take little memory and delay nobody",
)
@pytest.mark.test_all
def test_connections_that_subscribe_and_come_back_take_little_memory_and_delay_nobody() -> None:
    dice = random.Random(7)
    before_bytes = psutil.Process().memory_info().rss
    with a_stream() as (stream, endpoint), a_subscriber(endpoint, "heartbeat/") as sub:
        wait_for_heartbeat(sub)
        peers: list[RawPeer] = []
        until_s = time.monotonic() + 5
        while time.monotonic() < until_s:
            if len(peers) < 60:
                peers.append(RawPeer(endpoint))
                peers[-1].socket.settimeout(0.2)
                peers[-1].greet(b"SUB")
            for peer in list(peers):
                if not peer.send(subscriptions(dice, 100, 200)):
                    peer.close()
                    peers.remove(peer)
        # Each byte of a subscription takes fifty in libzmq: without limits half a gigabyte.
        assert psutil.Process().memory_info().rss - before_bytes < 150 * 2**20
        while sub.poll(0):
            sub.recv_multipart()
        wait_for_heartbeat(sub)
        stream.stop()
        for peer in peers:
            peer.close()
