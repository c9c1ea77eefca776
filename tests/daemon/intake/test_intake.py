"""The intake over real sockets: every message gets exactly one answer, the right one, and the intake lives."""

import socket
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from sqlalchemy.exc import OperationalError

from daemon.errors import StartError
from daemon.records import WriteFailed
from tests.contract.peer import Peer
from tests.daemon.wire.wire_parts import a_line, a_png, an_inspect
from tests.waiting import until

pytestmark = pytest.mark.not_fast("waits for sockets")

PNG = a_png()


def test_a_catch_up_that_fails_is_answered_and_the_next_one_works(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        line.reader.items = [{"no seq": 1}]
        answer = peer.ask({"type": "results_since", "seq": 0, "source": "plc"})
        assert (answer["type"], answer["source"]) == ("busy", "plc")
        line.reader.items = []
        assert peer.ask({"type": "results_since", "seq": 0})["items"] == []


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
        assert second.silent()
        line.writer.going.set()
        assert first.take()["type"] == "accepted"
        answers = [second.take(), second.take()]
        assert [(a["type"], a["differs"]) for a in answers] == [("duplicate", False), ("duplicate", True)]
        assert len(line.writer.images) == 1


def test_a_failed_write_is_busy_for_all_and_the_backlog_is_empty_again(tmp_path: Path) -> None:
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        line.writer.fail_with = WriteFailed("no space left on device")
        line.writer.going.clear()
        peer.send(an_inspect(), PNG)
        peer.send(an_inspect(), PNG)
        until(lambda: line.admission.in_flight == 2)
        line.writer.going.set()
        for answer in (peer.take(), peer.take()):
            assert (answer["type"], answer["id"]) == ("busy", "i1")
            assert answer["retry_after_ms"] > 0
        assert (line.backlog.images, line.backlog.bytes) == (0, 0)
        line.writer.fail_with = None
        assert peer.ask(an_inspect(), PNG)["type"] == "accepted"


def test_a_database_that_gives_no_answer_is_busy_and_asked_nothing_while_images_are_held(tmp_path: Path) -> None:
    errors = [OSError("database is locked"), OperationalError("SELECT", {}, OSError("connection timeout expired"))]
    with a_line(tmp_path) as line, Peer(line.tcp) as peer:
        find, questions = line.reader.find, list[str]()

        def away(source: str, image_id: str) -> None:
            questions.append(image_id)
            raise errors[len(questions) - 1]

        line.reader.find = away
        assert [peer.ask(an_inspect(), PNG)["type"] for _ in errors] == ["busy", "busy"]
        line.admission.hold("files", "the database does not answer")
        assert [peer.ask(an_inspect(), PNG)["reason"] for _ in range(3)] == ["the database does not answer"] * 3
        assert questions == ["i1", "i1"]
        line.reader.find = find
        line.admission.resume("files")
        assert peer.ask(an_inspect(), PNG)["type"] == "accepted"


def test_what_comes_beyond_the_credit_is_answered_busy_and_hello_costs_none(tmp_path: Path) -> None:
    with a_line(tmp_path, credit=4) as line, Peer(line.tcp) as greedy, Peer(line.tcp) as modest:
        line.writer.going.clear()
        for number in range(7):
            greedy.send(an_inspect(f"i{number}"), PNG)
        assert {greedy.take()["id"] for _ in range(3)} == {"i4", "i5", "i6"}
        assert greedy.ask({"type": "hello"})["credit"] == 4
        modest.send(an_inspect("o1", source="cam-2"), PNG)
        until(lambda: line.admission.in_flight == 5)
        line.writer.going.set()
        answers = [greedy.take() for _ in range(4)]
        assert [(a["type"], a["id"]) for a in answers] == [("accepted", f"i{n}") for n in range(4)]
        assert modest.take()["type"] == "accepted"
        assert line.admission.in_flight == 0


@pytest.mark.promise("Overload and hostile publishers", "Every message of a flood gets exactly one answer")
def test_every_message_of_a_flood_gets_exactly_one_answer(tmp_path: Path) -> None:
    with a_line(tmp_path, credit=8) as line, Peer(line.ipc) as peer:
        for number in range(3000):
            peer.send(an_inspect(f"i{number}"), PNG)
            peer.send(b"junk")
        kinds = Counter((answer := peer.take())["type"] + answer.get("code", "") for _ in range(6000))
        assert kinds["rejectedbad_header"] == 3000
        assert kinds["accepted"] + kinds["busy"] == 3000
        assert kinds["accepted"] >= 8
        assert peer.silent()


@pytest.mark.promise("Overload and hostile publishers", "Peers that vanish leave nothing behind")
def test_peers_that_vanish_with_answers_on_the_way_leave_nothing_behind(tmp_path: Path) -> None:
    with a_line(tmp_path) as line:
        before = psutil.Process().num_fds()
        line.writer.going.clear()
        peers = [Peer(line.tcp if n % 2 else line.ipc) for n in range(20)]
        for number, peer in enumerate(peers):
            peer.send(an_inspect(f"i{number}"), PNG)
        until(lambda: line.admission.in_flight == 20)
        for peer in peers:
            peer.close()
        until(lambda: psutil.Process().num_fds() <= before)  # the intake's side of each is closed too
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
    with a_line(tmp_path, max_payload_bytes=10_000) as line, Peer(line.tcp) as peer, Peer(line.tcp) as honest:
        assert peer.ask(an_inspect("large"), bytes(39_000))["code"] == "too_large"
        peer.send(an_inspect("huge"), bytes(1_000_000))
        assert honest.ask(an_inspect("fine"), PNG)["type"] == "accepted"
        assert peer.silent()


@pytest.mark.promise("Overload and hostile publishers", "A flooding source does not delay a quiet one")
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
        assert peer.take()["type"] == "accepted"


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
