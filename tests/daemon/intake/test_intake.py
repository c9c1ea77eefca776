"""The intake over real sockets: every message gets exactly one answer, the right one, and the intake lives."""

import contextlib
import hashlib
import json
import os
import socket
import stat
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import OperationalError

from coserve_client import CameraImage, Publisher, publish_images
from daemon.errors import StartError
from daemon.intake.backlog import BacklogLimits
from daemon.intake.intake import Intake
from daemon.storage.writer import Duplicate, WriteFailed
from tests.daemon.wire.wire_parts import RULES, Peer, a_line, a_png, a_rulebook, an_inspect
from tests.waiting import until

PNG = a_png()


def test_an_image_is_accepted_over_ipc_and_tcp_by_dealer_and_req(tmp_path: Path) -> None:
    with a_line(tmp_path) as line:
        number = 0
        for endpoint in (line.ipc, line.tcp):
            for kind in (zmq.DEALER, zmq.REQ):
                number += 1
                with Peer(endpoint, kind) as peer:
                    answer = peer.ask(an_inspect(f"i{number}"), PNG)
                    assert answer == {"type": "accepted", "id": f"i{number}", "source": "cam-1", "credit": 64}
        assert [arrival.image_id for arrival in line.writer.arrivals] == ["i1", "i2", "i3", "i4"]
        assert line.writer.arrivals[0].payload_sha256 == hashlib.sha256(PNG).hexdigest()
        assert line.counts == ["accepted"] * 4


def test_a_dealer_that_sends_a_delimiter_gets_one_back(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.ipc) as peer:
        peer.socket.send_multipart([b"", b"CS1", json.dumps(an_inspect()).encode(), PNG])
        frames = peer.socket.recv_multipart()
        assert frames[:2] == [b"", b"CS1"]
        assert json.loads(frames[2])["type"] == "accepted"


def test_a_req_that_correlates_its_requests_is_answered(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.ipc, zmq.REQ) as peer:
        peer.socket.setsockopt(zmq.REQ_CORRELATE, 1)
        assert peer.ask({"type": "hello"})["type"] == "welcome"


def test_hello_says_what_a_publisher_has_to_know(tmp_path: Path) -> None:
    with a_line(tmp_path, items=[{"seq": 9}]) as line, Peer(line.tcp) as peer:
        welcome = peer.ask({"type": "hello"})
        version = welcome.pop("rules_version")
        assert len(version) == 12
        assert welcome == {
            "type": "welcome",
            "id": None,
            "source": None,
            "version": 1,
            "server": "coserve",
            "credit": 64,
            "max_payload_bytes": 1_000_000,
            "max_pixels": 64_000_000,
            "last_seq": 9,
        }


def test_a_consumer_catches_up_page_by_page(tmp_path: Path) -> None:
    items = [{"seq": seq, "topic": "board/a/b/"} for seq in range(3, 9)]
    with a_line(tmp_path, items=items) as line, Peer(line.tcp) as peer:
        first = peer.ask({"type": "results_since", "seq": 0, "limit": 4})
        assert (first["type"], first["items"], first["more"]) == ("results", items[:4], True)
        assert (first["last_seq"], first["oldest_seq"]) == (6, 3)
        second = peer.ask({"type": "results_since", "seq": first["last_seq"], "limit": 4})
        assert (second["items"], second["more"], second["last_seq"]) == (items[4:], False, 8)
        empty = peer.ask({"type": "results_since", "seq": 100})
        assert (empty["items"], empty["last_seq"], empty["more"]) == ([], 100, False)
        assert peer.ask({"type": "results_since", "seq": -1})["code"] == "bad_field"


def test_a_catch_up_that_fails_is_answered_and_the_next_one_works(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        line.reader.items = [{"no seq": 1}]
        answer = peer.ask({"type": "results_since", "seq": 0, "source": "plc"})
        assert (answer["type"], answer["source"]) == ("busy", "plc")
        line.reader.items = []
        assert peer.ask({"type": "results_since", "seq": 0})["items"] == []


def test_generate_is_checked_and_then_its_model_is_unknown(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        header = {"type": "generate", "id": "g1", "source": "s", "model": "m", "prompt": "p"}
        answer = peer.ask(header)
        assert (answer["type"], answer["code"], answer["id"]) == ("rejected", "unknown_model", "g1")
        assert peer.ask({**header, "prompt": 5})["code"] == "bad_field"


def test_each_fault_earns_its_code_in_the_order_of_the_protocol(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:

        def code(payload: bytes | None = b"no image", **fields: Any) -> str:
            answer = peer.ask(an_inspect("bad", **fields), payload)
            assert (answer["type"], answer["id"], answer["source"]) == ("rejected", "bad", "cam-1")
            assert answer["reason"]
            assert answer["credit"] >= 1
            return answer["code"]

        unknown_board = {"type": "nope", "serial": "s"}
        assert code(board=unknown_board, component="nope", deadline_ms=0) == "bad_field"
        assert code(board=unknown_board, component="nope") == "unknown_board"
        assert code(component="nope") == "unknown_component"
        assert code() == "bad_image"
        assert code(None) == "bad_image"
        assert code(b"") == "bad_image"
        assert code(PNG, sha256="0" * 64) == "bad_image"
        assert code(PNG[:-12]) == "bad_image"
        assert code(a_png(60_000, 60_000)) == "too_large"
        assert code(PNG + bytes(1_000_001)) == "too_large"
        assert code(bytes(5), encoding="raw", shape=[2, 2, 1], dtype="uint8") == "bad_image"
        assert line.writer.arrivals == []
        good = an_inspect("bad", board={"type": "open-board", "serial": "s"}, component="SOMETHING")
        assert peer.ask(good, PNG)["type"] == "accepted"
        raw = an_inspect("raw", encoding="raw", shape=[2, 2, 1], dtype="uint8")
        assert peer.ask(raw, bytes(4))["type"] == "accepted"


def test_the_bytes_of_bad_images_are_kept_and_the_oldest_go_first(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        peer.ask(an_inspect("a/../../b", sha256="0" * 64), PNG)
        peer.ask(an_inspect("cut"), PNG[:-5])
        kept = sorted(line.quarantine.iterdir())
        assert [path.read_bytes() for path in kept] == [PNG, PNG[:-5]]
        assert "a%2F" in kept[0].name
        for number in range(4):
            peer.ask(an_inspect(f"n{number}"), bytes([number]) * 400_000)
        kept = sorted(line.quarantine.iterdir())
        assert [path.read_bytes()[:1] for path in kept] == [b"\x02", b"\x03"]


def test_a_known_image_is_a_duplicate_before_anything_else_is_looked_at(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        assert peer.ask(an_inspect(), PNG)["type"] == "accepted"
        line.admission.hold("drain", "the daemon drains")
        again = peer.ask(an_inspect(), PNG)
        assert again == {"type": "duplicate", "id": "i1", "source": "cam-1", "credit": 64, "differs": False}
        assert peer.ask(an_inspect(component="nope"), b"other")["differs"] is True
        assert peer.ask(an_inspect())["differs"] is True
        assert peer.ask(an_inspect(source="cam-2"), PNG)["type"] == "busy"
        assert peer.ask(an_inspect(deadline_ms=0), PNG)["code"] == "bad_field"


def test_a_repetition_of_an_image_in_flight_waits_for_the_disk(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as first, Peer(line.ipc) as second:
        line.writer.going.clear()
        first.send(an_inspect(), PNG)
        until(lambda: line.admission.in_flight == 1)
        second.send(an_inspect(), PNG)
        second.send(an_inspect(), PNG + b"tail")
        until(lambda: line.admission.in_flight == 3)
        assert second.has_silence()
        line.writer.going.set()
        assert first.receive()["type"] == "accepted"
        answers = [second.receive(), second.receive()]
        assert [(a["type"], a["differs"]) for a in answers] == [("duplicate", False), ("duplicate", True)]
        assert len(line.writer.arrivals) == 1


def test_a_failed_write_is_busy_for_all_and_the_backlog_is_empty_again(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        line.writer.fail_with = WriteFailed("no space left on device")
        line.writer.going.clear()
        peer.send(an_inspect(), PNG)
        peer.send(an_inspect(), PNG)
        until(lambda: line.admission.in_flight == 2)
        line.writer.going.set()
        for answer in (peer.receive(), peer.receive()):
            assert (answer["type"], answer["id"]) == ("busy", "i1")
            assert answer["retry_after_ms"] > 0
        assert (line.backlog.images, line.backlog.bytes) == (0, 0)
        line.writer.fail_with = None
        assert peer.ask(an_inspect(), PNG)["type"] == "accepted"


def test_an_image_that_the_writer_knew_already_is_a_duplicate(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        line.writer.fail_with = Duplicate(hashlib.sha256(PNG).hexdigest())
        assert peer.ask(an_inspect(), PNG)["differs"] is False
        assert peer.ask(an_inspect(), PNG + b"tail")["differs"] is True
        assert line.backlog.images == 0


def test_a_database_that_cannot_be_read_is_busy_and_passes(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        find = line.reader.find

        def broken(source: str, image_id: str) -> None:
            raise OSError("database is locked")

        line.reader.find = broken
        assert peer.ask(an_inspect(), PNG)["type"] == "busy"
        line.reader.find = find
        assert peer.ask(an_inspect(), PNG)["type"] == "accepted"


def test_a_database_that_gave_no_answer_is_asked_nothing_while_images_are_held(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        find, asked = line.reader.find, list[str]()

        def away(source: str, image_id: str) -> None:
            asked.append(image_id)
            raise OperationalError("SELECT", {}, OSError("connection timeout expired"))

        line.reader.find = away
        assert peer.ask(an_inspect(), PNG)["type"] == "busy"
        line.admission.hold("files", "the database does not answer")
        assert [peer.ask(an_inspect(), PNG)["reason"] for _ in range(3)] == ["the database does not answer"] * 3
        assert asked == ["i1"]
        line.reader.find = find
        line.admission.resume("files")
        assert peer.ask(an_inspect(), PNG)["type"] == "accepted"


def test_a_full_backlog_is_busy_until_a_verdict_makes_room(tmp_path: Path) -> None:
    with a_line(tmp_path, backlog=BacklogLimits(3, 10**6, 3, 10**6)) as line, Peer(line.tcp) as peer:
        line.writer.on_stored = lambda _: None
        announced = [peer.ask(an_inspect(f"i{n}"), PNG)["credit"] for n in range(3)]
        assert announced == [2, 1, 1]
        full = peer.ask(an_inspect("i3"), PNG)
        assert (full["type"], full["credit"]) == ("busy", 1)
        assert full["retry_after_ms"] >= 1
        assert peer.ask(an_inspect("i0"), PNG)["type"] == "duplicate"
        line.backlog.leave("cam-1", len(PNG))
        assert peer.ask(an_inspect("i3"), PNG)["type"] == "accepted"


def test_what_comes_beyond_the_credit_is_answered_busy_and_hello_costs_none(tmp_path: Path) -> None:
    with a_line(tmp_path, credit=4) as line, Peer(line.tcp) as greedy, Peer(line.tcp) as other:
        line.writer.going.clear()
        for number in range(7):
            greedy.send(an_inspect(f"i{number}"), PNG)
        assert {greedy.receive()["id"] for _ in range(3)} == {"i4", "i5", "i6"}
        assert greedy.ask({"type": "hello"})["credit"] == 4
        other.send(an_inspect("o1", source="cam-2"), PNG)
        until(lambda: line.admission.in_flight == 5)
        line.writer.going.set()
        answers = [greedy.receive() for _ in range(4)]
        assert [(a["type"], a["id"]) for a in answers] == [("accepted", f"i{n}") for n in range(4)]
        assert other.receive()["type"] == "accepted"
        assert line.admission.in_flight == 0


def test_draining_is_busy_and_ends(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        line.admission.hold("drain", "the daemon drains")
        line.admission.hold("disk", "the disk is full")
        assert peer.ask(an_inspect(), PNG)["reason"] == "the daemon drains"
        line.admission.resume("drain")
        answer = peer.ask(an_inspect(), PNG)
        assert (answer["type"], answer["retry_after_ms"]) == ("busy", 1000)
        line.admission.resume("disk")
        assert peer.ask(an_inspect(), PNG)["type"] == "accepted"


def test_every_message_of_a_flood_gets_exactly_one_answer(tmp_path: Path) -> None:
    with a_line(tmp_path, credit=8) as line, Peer(line.ipc) as peer:
        for number in range(3000):
            peer.send(an_inspect(f"i{number}"), PNG)
            peer.send(b"junk")
        kinds = Counter((answer := peer.receive())["type"] + answer.get("code", "") for _ in range(6000))
        assert kinds["rejectedbad_header"] == 3000
        assert kinds["accepted"] + kinds["busy"] == 3000
        assert kinds["accepted"] >= 8
        assert peer.has_silence()


def test_peers_that_vanish_with_answers_on_the_way_leave_nothing_behind(tmp_path: Path) -> None:
    with a_line(tmp_path) as line:
        before = sockets()
        line.writer.going.clear()
        peers = [Peer(line.tcp if n % 2 else line.ipc) for n in range(20)]
        for number, peer in enumerate(peers):
            peer.send(an_inspect(f"i{number}"), PNG)
        until(lambda: line.admission.in_flight == 20)
        for peer in peers:
            peer.close()
        until(lambda: sockets() <= before)  # the intake's side of each is closed too
        line.writer.going.set()
        until(lambda: line.admission.in_flight == 0)
        with Peer(line.tcp) as peer:
            assert peer.ask(an_inspect("i0"), PNG)["type"] == "duplicate"
        until(lambda: line.intake.dropped_answers == 20)


def test_a_camera_that_returns_under_its_name_is_answered(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp, identity=b"camera-7") as old:
        assert old.ask({"type": "hello"})["type"] == "welcome"
        with Peer(line.tcp, identity=b"camera-7") as new:
            assert new.ask({"type": "hello"})["type"] == "welcome"


def test_one_who_sends_far_too_much_is_cut_off_and_the_others_go_on(tmp_path: Path) -> None:
    with a_line(tmp_path, max_payload_bytes=10_000) as line, Peer(line.tcp) as peer, Peer(line.tcp) as other:
        assert peer.ask(an_inspect("large"), bytes(39_000))["code"] == "too_large"
        peer.send(an_inspect("huge"), bytes(1_000_000))
        assert other.ask(an_inspect("fine"), PNG)["type"] == "accepted"
        assert peer.has_silence()


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\xff\0\0\0\0\0\0\0\x01\x7f\x03", b""])
def test_half_a_greeting_on_the_port_harms_nobody(tmp_path: Path, junk: bytes) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        host, port = line.tcp.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(junk)
            assert peer.ask(an_inspect(), PNG)["type"] == "accepted"


def test_malformed_frames_get_one_answer_each_and_the_intake_lives(tmp_path: Path) -> None:
    header = json.dumps(an_inspect("h")).encode()
    pieces = st.sampled_from([b"", b"CS1", b"CS2", b"CS", header, header[:-3], b"{}", b"[]", PNG]) | st.binary(
        max_size=60
    )
    with a_line(tmp_path) as line, Peer(line.ipc) as peer:

        @settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
        @given(frames=st.lists(pieces, min_size=1, max_size=5))
        def check(frames: list[bytes]) -> None:
            peer.socket.send_multipart(frames)
            assert peer.socket.poll(60_000), "no answer"
            *envelope, magic, answer = peer.socket.recv_multipart()
            assert magic == b"CS1"
            assert envelope == ([b""] if frames[0] == b"" else envelope)
            body = json.loads(answer)
            assert body["type"] in {"rejected", "accepted", "duplicate"}
            assert {"id", "source", "credit"} <= body.keys()
            assert not peer.socket.poll(0), "a second answer"

        check()
        assert line.intake.is_alive
        assert peer.ask({"type": "hello"})["type"] == "welcome"


def test_a_flooding_source_does_not_hold_up_a_quiet_one(tmp_path: Path) -> None:
    with a_line(tmp_path, credit=8) as line, Peer(line.tcp) as quiet, Peer(line.tcp) as flood:
        stop = threading.Event()

        def pour() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                flood.send(an_inspect(f"f{number}", source="flood"), PNG)
                while flood.socket.poll(0):
                    flood.socket.recv_multipart()

        pouring = threading.Thread(target=pour)
        pouring.start()
        try:
            for number in range(50):
                assert quiet.ask(an_inspect(f"q{number}"), PNG)["type"] == "accepted"
        finally:
            stop.set()
            pouring.join()


def test_the_python_publisher_loses_nothing_while_writes_fail_and_the_backlog_is_full(tmp_path: Path) -> None:
    limits = BacklogLimits(10, 10**6, 10, 10**6)
    with a_line(tmp_path, credit=8, backlog=limits) as line, Publisher(line.ipc, "cam") as publisher:
        line.writer.fail_with = WriteFailed("no space left on device")

        def recover() -> None:
            until(lambda: line.counts.count("busy") >= 8)
            line.writer.fail_with = None

        recovering = threading.Thread(target=recover)
        recovering.start()
        board = {"type": "mainboard-a", "serial": "S1"}
        account = publish_images(publisher, [CameraImage(f"i{n}", PNG, board, "R0402") for n in range(300)])
        recovering.join()
        assert account.complete
        assert account.busy > 0
        assert sorted(arrival.image_id for arrival in line.writer.arrivals) == sorted(f"i{n}" for n in range(300))


def test_stopping_waits_for_the_answers_to_what_was_taken(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        line.writer.going.clear()
        peer.send(an_inspect(), PNG)
        until(lambda: line.admission.in_flight == 1)
        stopping = threading.Thread(target=line.intake.stop)
        stopping.start()
        time.sleep(0.05)
        line.writer.going.set()
        stopping.join()
        assert peer.receive()["type"] == "accepted"


def test_the_ipc_socket_has_mode_0660_and_goes_with_the_intake(tmp_path: Path) -> None:
    with a_line(tmp_path) as line:
        path = Path(line.ipc.removeprefix("ipc://"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert not path.exists()


def test_a_stale_socket_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "intake.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with a_line(tmp_path) as line, Peer(line.ipc) as peer:
        assert peer.ask({"type": "hello"})["type"] == "welcome"
        with pytest.raises(StartError, match="another process listens"), a_line(tmp_path):
            pass
        assert peer.ask({"type": "hello"})["type"] == "welcome"


def test_what_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "intake.sock").write_text("precious")
    with pytest.raises(StartError, match="not a socket is in the way"), a_line(tmp_path):
        pass
    assert (tmp_path / "intake.sock").read_text() == "precious"


def test_a_socket_path_of_107_bytes_is_bound_and_108_are_refused(tmp_path: Path) -> None:
    room = 107 - len(os.fsencode(tmp_path)) - len("/intake.sock") - 1
    longest = tmp_path / ("x" * room)
    with a_line(longest) as line, Peer(line.ipc) as peer:
        assert peer.ask({"type": "hello"})["type"] == "welcome"
    with pytest.raises(StartError, match="107 at most"), a_line(tmp_path / ("x" * (room + 1))):
        pass


def sockets() -> int:
    """How many this process has open."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(entry.readlink()).startswith("socket:")
    return found


def test_an_open_attempt_is_checked_against_the_rules_it_opened_with(tmp_path: Path) -> None:
    board = {"type": "mainboard-b", "serial": "S1"}
    with a_line(tmp_path) as line, Peer(line.ipc) as peer:
        older = line.rulebook.current.version
        assert peer.ask(an_inspect("i0", board=board), PNG)["code"] == "unknown_board"
        line.rulebook.replace(a_rulebook(RULES.replace("mainboard-a", "mainboard-b")).current)
        assert peer.ask(an_inspect("i1"), PNG)["code"] == "unknown_board"
        line.reader.open_rules_version = older
        assert peer.ask(an_inspect("i2"), PNG)["type"] == "accepted"
        assert peer.ask(an_inspect("i3", board=board), PNG)["code"] == "unknown_board"
        line.reader.open_rules_version = "0" * 12  # rules that nothing compiles any more: those in force judge
        assert peer.ask(an_inspect("i4", board=board), PNG)["type"] == "accepted"


def test_an_intake_that_never_started_stops_at_once(tmp_path: Path) -> None:
    with a_line(tmp_path) as line:
        context: zmq.Context[Any] = zmq.Context()
        Intake(context, [line.ipc], line.admission, line.reader.results_since).stop()
        context.term()
