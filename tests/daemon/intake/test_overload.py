"""Overload over real sockets: queues are bounded in bytes and count, and no source pays for another one's flood."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog.testing

from daemon.intake import admission
from daemon.intake.backlog import BacklogLimits
from tests.contract.peer import Peer
from tests.daemon.wire.wire_parts import Line, a_line, a_png, an_inspect
from tests.stress.mutate import Mutator, Seed
from tests.stress.raw import GREETING, RawPeer, frame, frame_head
from tests.waiting import until

pytestmark = pytest.mark.not_fast("waits for sockets")

PNG = a_png()
THIS = psutil.Process()
ROOM = BacklogLimits(10_000, 10**9, 10_000, 10**9)


@contextmanager
def many_peers(line: Line, count: int) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Peer((line.ipc, line.tcp)[n % 2])) for n in range(count)]


@pytest.mark.promise(
    "Overload and hostile publishers",
    "Images in memory on their way to the disk are bounded in bytes, per source and in total; beyond the limit "
    "publishers get `busy`, once per message",
)
def test_images_on_their_way_to_the_disk_are_bounded_in_bytes_of_one_source_and_of_all(tmp_path: Path) -> None:
    payload = PNG + bytes(100_000)
    with a_line(tmp_path, in_memory_bytes=4_000_000, backlog=ROOM) as line, many_peers(line, 30) as peers:
        line.writer.going.clear()
        for number, peer in enumerate(peers):
            for image in range(10):
                peer.send(an_inspect(f"{number}/{image}", source=f"cam-{number % 3}"), payload)
        until(lambda: len(line.counts) >= 240)
        assert line.admission.memory.bytes <= 4_000_000
        line.writer.going.set()
        kinds = [peer.take()["type"] for peer in peers for _ in range(10)]
        assert kinds.count("accepted") + kinds.count("busy") == 300
        assert 20 <= kinds.count("accepted") == len(line.writer.images) < 60
        assert all(peer.silent(0.0) for peer in peers)
        until(lambda: line.admission.memory.bytes == 0)
        assert peers[0].ask(an_inspect("again"), payload)["type"] == "accepted"


@pytest.mark.promise(
    "Overload and hostile publishers",
    "Large payloads and images of very many parts delay no other client: a separate thread examines them",
)
def test_a_large_payload_is_looked_at_elsewhere_and_a_small_one_need_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned_in: set[str] = set()

    def scan(payload: bytes, *arguments: Any) -> admission.PayloadScan:
        if len(payload) > 2**20:
            scanned_in.add(threading.current_thread().name)
        return scan_payload(payload, *arguments)

    scan_payload = admission.scan_payload
    monkeypatch.setattr(admission, "scan_payload", scan)
    with (
        a_line(tmp_path, max_payload_bytes=2**26, backlog=ROOM, in_memory_bytes=10**9) as line,
        Peer(line.ipc) as large,
        Peer(line.ipc) as small,
    ):
        for number in range(8):
            large.send(an_inspect(f"l{number}", source="cam-large"), PNG + bytes(40_000_000 + number))
        assert small.ask(an_inspect("s"), PNG)["type"] == "accepted"
        answers = [large.take() for _ in range(8)]
        assert {answer["type"] for answer in answers} == {"accepted"}
        assert line.admission.in_flight == 0
    assert scanned_in == {"payload-scanner"}


def test_a_consumer_that_asks_and_never_reads_is_bounded_and_others_are_answered(tmp_path: Path) -> None:
    items = [{"seq": seq, "topic": "board/a/b/", "text": "x" * 500} for seq in range(1, 3000)]
    with a_line(tmp_path, items=items) as line, Peer(line.tcp) as deaf, Peer(line.tcp) as honest:
        line.reader.going.clear()
        before_bytes = THIS.memory_info().rss
        for _ in range(5000):
            deaf.send({"type": "results_since", "seq": 0, "limit": 1000})
        until(lambda: "busy" in line.counts)
        line.reader.going.set()
        page = honest.ask({"type": "results_since", "seq": 10, "limit": 1000})
        assert page["items"][0]["seq"] == 11
        assert page["more"]
        assert len(page["items"]) >= 100
        until(lambda: len(line.counts) > 5000)
        # Whole pages for all that may wait would be 64 MB, here in the process of the line.
        assert THIS.memory_info().rss - before_bytes < 60 * 2**20
        answers = [deaf.take() for _ in range(5000)]
        kinds = {answer["type"] for answer in answers}
        assert kinds == {"results", "busy"}
        assert min(len(answer["items"]) for answer in answers if answer["type"] == "results") >= 10
        assert deaf.silent()


def test_the_answers_that_wait_for_a_peer_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.intake.intake._ANSWERS_PER_PEER", 10)
    with a_line(tmp_path) as line, Peer(line.tcp, rcvhwm=1) as deaf, Peer(line.tcp) as honest:

        def has_dropped() -> bool:
            for _ in range(1000):
                deaf.send({"type": "hello"})
            return line.intake.dropped_answers > 100

        until(has_dropped)  # once the sockets' own buffers are full
        assert honest.ask({"type": "hello"})["type"] == "welcome"


@pytest.mark.parametrize("way", ["tcp", "ipc"])
def test_pages_of_results_that_a_consumer_never_reads_do_not_fill_the_memory(way: str, tmp_path: Path) -> None:
    items = [{"seq": seq, "topic": "board/a/b/", "text": "x" * 500} for seq in range(1, 200)]
    question = json.dumps({"type": "results_since", "seq": 0, "limit": 1000}).encode()
    with a_line(tmp_path, items=items) as line, RawPeer(getattr(line, way)) as deaf, Peer(line.tcp) as honest:
        deaf.greet()
        before_bytes = THIS.memory_info().rss
        for asked in range(10, 2001, 10):  # a page has about 60 KB
            assert deaf.send(10 * (frame(b"CS1", more=True) + frame(question, more=False)))
            until(lambda asked=asked: len(line.counts) >= asked)
        assert THIS.memory_info().rss - before_bytes < 40 * 2**20
        assert line.counts.count("busy") > 1000
        assert honest.ask({"type": "results_since", "seq": 0, "limit": 10})["type"] == "results"


def test_who_never_finishes_its_handshake_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.wire.socket_thread._HANDSHAKE_MS", 300)
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        assert peer.ask({"type": "hello"})["type"] == "welcome"
        before = THIS.num_fds()
        mute = [RawPeer((line.ipc, line.tcp)[n % 2]) for n in range(60)]
        for number, raw in enumerate(mute):
            raw.send(GREETING[: number % 64])
        assert peer.ask(an_inspect(), PNG)["type"] == "accepted"
        until(lambda: all(raw.is_cut() for raw in mute))
        for raw in mute:
            raw.close()
        until(lambda: THIS.num_fds() <= before + 2)


def test_a_frame_that_says_it_is_enormous_is_cut_before_any_of_it_is_kept(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer, RawPeer(line.tcp) as raw:
        raw.greet().send(frame(b"CS1", more=True) + frame_head(2**50, more=False) + bytes(1000))
        until(lambda: raw.is_cut(0.01))
        too_large = 4 * line.admission.limits.max_payload_bytes + 1  # memory for it could be had
        with RawPeer(line.tcp) as second:
            second.greet()
            assert peer.ask({"type": "hello"})["type"] == "welcome"  # by then the handshake is over
            second.send(frame(b"CS1", more=True) + frame_head(too_large, more=False) + bytes(1000))
            until(lambda: second.is_cut(0.01))
        assert peer.ask(an_inspect(), PNG)["type"] == "accepted"


@pytest.mark.promise(
    "Overload and hostile publishers",
    "Endless messages, enormous frames, a thousand parts, too many connections, half handshakes: the "
    "connection is cut and no handle leaks",
)
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_message_that_never_ends_is_cut_and_others_go_on(tmp_path: Path, transport: str) -> None:
    part = frame(bytes(1000), more=True) * 1000
    with a_line(tmp_path) as line, Peer(line.tcp) as peer, RawPeer(getattr(line, transport)) as raw:
        raw.greet()
        sent_mb = 0
        while raw.send(part):
            sent_mb += 1
            assert sent_mb < 8000, "a message of 8 GB was taken"
        assert peer.ask(an_inspect(), PNG)["type"] == "accepted"


def test_connections_beyond_the_most_are_cut_and_those_before_them_stay(tmp_path: Path) -> None:
    with a_line(tmp_path, max_connections=10) as line, Peer(line.tcp) as peer:
        assert peer.ask({"type": "hello"})["type"] == "welcome"
        before = THIS.num_fds()
        crowd = [RawPeer((line.ipc, line.tcp)[n % 2]).greet() for n in range(30)]
        until(lambda: sum(raw.is_cut() for raw in crowd) >= 20)
        until(lambda: THIS.num_fds() <= before + len(crowd) + 10)  # the crowd's own ends, and 10 of the line
        assert peer.ask(an_inspect("a"), PNG)["type"] == "accepted"
        for raw in crowd:
            raw.close()
        until(lambda: can_ask(line.ipc))


def can_ask(endpoint: str) -> bool:
    with Peer(endpoint) as peer:
        peer.send({"type": "hello"})
        return bool(peer.socket.poll(5000))


@pytest.mark.promise(
    "Overload and hostile publishers",
    "Malformed frames, half greetings and oversized messages do not affect other clients",
)
@pytest.mark.promise(
    "Overload and hostile publishers",
    "Fuzzed messages get one answer each and break nothing while an honest publisher works",
)
def test_twenty_thousand_fuzzed_frames_get_one_answer_each_and_break_nothing(tmp_path: Path) -> None:
    board = {"type": "open-board", "serial": "F1", "lot": "L"}
    valid = [
        Seed({**an_inspect("f", board=board), "designator": "P1", "deadline_ms": 9, "captured_at": None}, PNG),
        Seed({**an_inspect("r", board=board), "encoding": "raw", "shape": [2, 2, 3], "dtype": "uint8"}, bytes(12)),
        Seed({"type": "hello", "source": "fuzz"}, None),
        Seed({"type": "results_since", "seq": 0, "limit": 3}, None),
        Seed({"type": "generate", "id": "g", "source": "fuzz", "model": "m", "prompt": "p"}, None),
    ]
    mutator = Mutator(7, valid)
    sent = 0
    with (
        structlog.testing.capture_logs() as logs,
        a_line(tmp_path) as line,
        Peer(line.ipc) as local,
        Peer(line.tcp) as remote,
        Peer(line.tcp) as honest,
    ):
        number = 0
        while sent < 20_000:
            for peer in (local, remote):
                messages = [mutator.next() for _ in range(64)]
                for message in messages:
                    peer.socket.send_multipart(message)
                    sent += len(message)
                for _ in messages:
                    assert peer.socket.poll(60_000), "a message has no answer"
                    answer = json.loads(peer.socket.recv_multipart()[-1])
                    assert {"type", "id", "source", "credit"} <= answer.keys()
            number += 1
            assert honest.ask(an_inspect(f"h{number}", source="honest"), PNG)["type"] == "accepted"
        assert local.silent()
        assert remote.silent()
    assert [log for log in logs if log["log_level"] in ("error", "critical")] == []
