"""PROTOCOL.md, sentence by sentence, against a running daemon: real sockets, a client that speaks by hand."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from PIL import Image

from tests.contract.client import RULES, Line, Peer, running, sha256
from tests.daemon.host.manager import HOLDABLE
from tests.daemon.wire.wire_parts import a_png
from tests.experts.pictures import encoded
from tests.lines import a_jpeg
from tests.ports import free_port
from tests.simulated import DAEMON
from tests.tools.run_commands import coserve
from tests.waiting import PATIENCE_S

MAX_PAYLOAD_BYTES = 300_000
MAX_PIXELS = 1_000_000
CREDIT = 16
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
INSPECTION = (
    "topic seq at id source board component designator verdict defect reason late stages latency_ms rules_version"
    " inspection_id edition"
)
STAGE = "expert version settings label confidence detections device batch queued_ms load_ms infer_ms"


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Iterator[Line]:
    """One daemon for every test that leaves it as it was. Made under a umask that would shut the group out."""
    tcp = f"tcp://127.0.0.1:{free_port()}"
    endpoints = {
        "intake": ["ipc://run/intake.sock", tcp],
        "results": "ipc://run/results.sock",
        "control": "ipc://run/control.sock",
    }
    limits = {"credit": CREDIT, "max_payload_bytes": MAX_PAYLOAD_BYTES, "max_pixels": MAX_PIXELS}
    folder = tmp_path_factory.mktemp("wire") / "line"
    before = os.umask(0o077)
    try:
        with running(folder, experts_folder, endpoints=endpoints, journal="data/journal", limits=limits) as line:
            os.umask(before)
            yield line
    finally:
        os.umask(before)


@pytest.fixture(scope="module")
def peer(line: Line) -> Iterator[Peer]:
    with line.peer() as peer:
        yield peer


def keys(text: str) -> set[str]:
    return set(text.split())


# --- frames and header -------------------------------------------------------------------------------------------

HELLO = b'{"type": "hello"}'


#: One of each kind: tests/daemon/wire/test_messages.py has the whole tables.
@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([HELLO], "bad_frames"),
        ([b"CS1", HELLO, b"payload", b"more"], "bad_frames"),
        ([b"CS2", HELLO], "unsupported_version"),
        ([b"CS1", b'{"type": "hello", "type": "hello"}'], "bad_header"),
        ([b"CS1", HELLO + b" " * (64 * 1024 - len(HELLO) + 1)], "bad_header"),
        ([b"CS1", b'{"type": "greet"}'], "bad_field"),
    ],
)
def test_a_malformed_message_is_rejected_with_its_code(peer: Peer, frames: list[bytes], code: str) -> None:
    answer = peer.frames(*frames)
    assert (answer["type"], answer["code"], answer["id"], answer["source"]) == ("rejected", code, None, None)
    assert answer["reason"]
    assert 1 <= answer["credit"] <= CREDIT


def test_a_rejected_message_carries_id_and_source_where_they_are_legal(peer: Peer) -> None:
    header = {"type": "greet", "id": "a.b_c:d/e-1", "source": "cam 1"}
    assert peer.ask(header) | {"reason": "", "credit": 1} == {
        "type": "rejected", "id": "a.b_c:d/e-1", "source": None, "code": "bad_field", "reason": "", "credit": 1,
    }  # fmt: skip
    answer = peer.frames(b"CS2", b'{"id": "i", "source": "s"}')
    assert (answer["code"], answer["id"], answer["source"]) == ("unsupported_version", "i", "s")


def test_a_header_of_64_kib_and_fields_that_nobody_knows_are_taken(line: Line, peer: Peer) -> None:
    padding = b" " * (64 * 1024 - len(HELLO))
    assert peer.ask(HELLO + padding)["type"] == "welcome"
    assert peer.ask({"type": "hello", "colour": {"deep": [1, None]}})["type"] == "welcome"
    assert peer.ask(line.inspect(note="ü\u0000", deadline_ms=None, sha256=None), a_jpeg(1))["type"] == "accepted"


def test_hello_says_what_a_publisher_needs(line: Line, peer: Peer) -> None:
    welcome = peer.ask({"type": "hello", "id": "h", "source": "cam-9"})
    assert set(welcome) == keys(
        "type id source credit version server max_payload_bytes max_pixels rules_version last_seq line epoch"
    )
    status = line.status()
    assert (welcome["type"], welcome["version"], welcome["id"], welcome["source"]) == ("welcome", 1, "h", "cam-9")
    assert (welcome["credit"], welcome["max_payload_bytes"], welcome["max_pixels"]) == (
        CREDIT, MAX_PAYLOAD_BYTES, MAX_PIXELS,
    )  # fmt: skip
    assert welcome["rules_version"] == status["rules_version"]
    assert re.fullmatch(r"[0-9a-f]{12}", welcome["rules_version"])
    assert isinstance(welcome["last_seq"], int)
    assert isinstance(welcome["server"], str)


def test_req_and_dealer_are_served_over_ipc_and_tcp(line: Line) -> None:
    for endpoint in (line.intake, line.endpoints["intake"][1]):
        for kind in (zmq.REQ, zmq.DEALER):
            with Peer(endpoint, kind) as peer:
                assert peer.ask(line.inspect(), a_jpeg(1))["type"] == "accepted"
    with Peer(line.intake, zmq.REQ) as peer:
        peer.socket.setsockopt(zmq.REQ_CORRELATE, 1)
        assert peer.ask({"type": "hello"})["type"] == "welcome"
    with line.peer() as dealer:
        dealer.socket.send_multipart([b"", b"CS1", HELLO])
        assert dealer.socket.recv_multipart()[:2] == [b"", b"CS1"]


# --- fields of inspect and generate ------------------------------------------------------------------------------

BOARD = {"type": "free", "serial": "S1"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "x" * 129},
        {"source": "a\n"},
        {"board": BOARD | {"attempt": 0}},
        {"encoding": "raw", "shape": [10, 10, 4], "dtype": "uint8"},
    ],
    ids=json.dumps,
)
def test_a_wrong_field_is_rejected_before_anything_else(line: Line, peer: Peer, wrong: dict[str, Any]) -> None:
    # The board's type and the payload are wrong too: fields come first.
    header = line.inspect(board={"type": "stranger", "serial": "S"}) | wrong
    answer = peer.ask(header, b"no image")
    assert (answer["type"], answer["code"]) == ("rejected", "bad_field")
    assert answer["reason"]
    assert answer["id"] == (None if "id" in wrong else header["id"])
    assert answer["source"] == (None if "source" in wrong else header["source"])


def test_the_widest_legal_fields_are_taken(line: Line) -> None:
    wide = "\U0001f600" * 128
    image_id = line.send(
        id="A.z_9:/-" + "x" * 120, source="s" * 128, designator=wide, captured_at="2026-11-21T10:28:11.1234+01:00",
        board={"type": "free", "serial": wide, "lot": wide, "station": wide, "attempt": 2**31}, deadline_ms=86_400_000,
        sha256=sha256(a_jpeg(77)).upper(), payload=a_jpeg(77),
    )  # fmt: skip
    message = line.result(image_id)
    assert message["board"] == {"type": "free", "serial": wide, "lot": wide, "station": wide, "attempt": 2**31}
    assert message["designator"] == wide
    assert message["topic"] == f"inspection/free/{'%F0%9F%98%80' * 128}/"
    captured_at = line.rows("SELECT captured_at FROM inspections WHERE image_id = ?", image_id)
    assert captured_at == [("2026-11-21T09:28:11.123Z",)]


def test_generate_is_checked_and_then_no_model_is_known(peer: Peer) -> None:
    good = {"type": "generate", "id": "g1", "source": "mes", "model": "qwen", "prompt": "Why?"}
    answer = peer.ask(good | {"max_new_tokens": 5, "task": "report", "slo_ms": 900, "board": BOARD, "stream": True})
    assert (answer["type"], answer["code"], answer["id"], answer["source"]) == (
        "rejected", "unknown_model", "g1", "mes",
    )  # fmt: skip
    assert peer.ask(good | {"prompt": None})["code"] == "bad_field"


# --- duplicates, boards, payloads: in this order -----------------------------------------------------------------


@pytest.mark.promise("Nothing accepted is lost", "A repeated image is a `duplicate`, even while the line drains")
def test_a_repeated_image_is_a_duplicate_before_its_board_and_payload_are_looked_at(line: Line, peer: Peer) -> None:
    header = line.inspect()
    assert set(peer.ask(header, a_jpeg(5))) == keys("type id source credit attempt edition")
    again = peer.ask(header, a_jpeg(5))
    assert (again["type"], again.get("differs", False)) == ("duplicate", False)
    changed = peer.ask(header | {"board": {"type": "stranger", "serial": "S"}}, b"no image")
    assert (changed["type"], changed["differs"]) == ("duplicate", True)
    assert (changed["id"], changed["source"]) == (header["id"], header["source"])
    assert peer.ask(header | {"source": "cam-2"}, a_jpeg(5))["type"] == "accepted"
    twice = line.inspect()
    for payload in (a_jpeg(5), a_jpeg(5), a_jpeg(6)):
        peer.send(twice, payload)
    answers = [peer.take() for _ in range(3)]
    assert [(answer["type"], answer.get("differs", False)) for answer in answers] == [
        ("accepted", False), ("duplicate", False), ("duplicate", True),
    ]  # fmt: skip
    assert line.rows("SELECT count(*) FROM inspections WHERE image_id = ?", header["id"]) == [(2,)]


def test_the_board_is_checked_before_the_component_and_both_before_the_payload(line: Line, peer: Peer) -> None:
    unknown = line.inspect(board={"type": "stranger", "serial": "S"}, component="Q")
    assert peer.ask(unknown, b"no image")["code"] == "unknown_board"
    assert peer.ask(line.inspect(board={"type": "pair", "serial": "S"}, component="V"), b"x")["code"] == (
        "unknown_component"
    )
    assert peer.ask(line.inspect(component="no such classifier"), b"x")["code"] == "unknown_component"
    assert peer.ask(line.inspect(), b"no image")["code"] == "bad_image"


@pytest.mark.promise(
    "Nothing accepted is lost",
    "A position that the recipe does not list is refused at once: it never passes or fails another component's place",
)
@pytest.mark.parametrize(
    ("component", "designator", "reason"),
    [
        ("P", "F1", "designator 'F1' is the position of 'F', not of component 'P'"),
        ("F", "P1", "the nearest of 'F' is 'F1'"),
        ("P", "P20", "is no position of component 'P' in the recipe of board type 'named'; the nearest of 'P' is 'P2'"),
        ("P", "p1", "is no position"),
        ("P", None, "is no position"),  # the id counts as the designator
    ],
)
def test_a_position_that_the_recipe_does_not_list_is_refused_at_once(
    line: Line, peer: Peer, component: str, designator: str | None, reason: str
) -> None:
    header = line.inspect(board={"type": "named", "serial": "wrong"}, component=component, designator=designator)
    answer = peer.ask(header, a_jpeg(1))
    assert (answer["type"], answer["code"]) == ("rejected", "unknown_component")
    assert reason in answer["reason"]
    assert line.rows("SELECT count(*) FROM boards WHERE serial = 'wrong'") == [(0,)]


def test_a_serial_is_used_without_white_space_at_its_ends(line: Line) -> None:
    image_id = line.send(board={"type": "free", "serial": " D1-003\r\n"}, designator="D1")
    message = line.result(image_id)
    assert (message["topic"], message["board"]["serial"]) == ("inspection/free/D1-003/", "D1-003")
    assert line.rows("SELECT inspection_id FROM inspections WHERE image_id = ?", image_id) == [
        (message["inspection_id"],)
    ]
    with line.peer() as peer:
        again = line.inspect(id=image_id, board={"type": "free", "serial": "D1-003"}, designator="D1")
        assert peer.ask(again, a_jpeg(2))["type"] == "duplicate"


@pytest.mark.promise(
    "Nothing accepted is lost",
    "A board's attributes are as durable as its `accepted` images; those beyond the bounds cost no image",
)
def test_attributes_of_a_killed_daemons_images_are_kept(tmp_path: Path, experts_folder: Path) -> None:
    line = Line(tmp_path / "line", experts_folder)
    board = {"type": "named", "serial": "A1", "attributes": {"panel": "P-17", "order": "4711"}}
    with line.service() as service, line.held("R0402"):
        line.send(board=board, designator="P1")
        service.kill()
    with line.service():
        line.send(board=board | {"attributes": {"panel": "other", "operator": "Eva"}}, designator="P2")
        line.send(board=board, component="F", designator="F1")
        (message,) = line.boards("A1")
        assert "attributes" not in message["board"]
    ((text,),) = line.rows("SELECT attributes FROM boards")
    assert json.loads(text) == {"panel": "P-17", "order": "4711", "operator": "Eva"}


RAW = {"encoding": "raw", "dtype": "uint8"}


def pixels(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).integers(0, 255, shape, dtype=np.uint8)


def picture(mode: str = "RGB") -> Image.Image:
    return Image.fromarray(pixels(40, 60, 3)).convert(mode)


def test_raw_and_encoded_images_are_judged(line: Line) -> None:
    shapes = ((40, 60, 1), (40, 60, 3))
    ids = [line.send(pixels(*shape).tobytes(), **RAW, shape=shape) for shape in shapes]
    ids.append(line.send(encoded(picture("RGBA"), "PNG")))
    assert {line.result(image_id)["verdict"] for image_id in ids} == {"pass"}


@pytest.mark.parametrize(
    ("payload", "fields", "code"),
    [
        ([], {}, "bad_image"),
        ([b"GIF89a no picture at all"], {}, "bad_image"),
        ([a_jpeg(1)[:-2]], {}, "bad_image"),
        ([bytes(299)], RAW | {"shape": [10, 10, 3]}, "bad_image"),
        ([bytes(5)], RAW | {"shape": [1000, 1001, 1]}, "too_large"),
        ([a_png(1000, 1001)], {}, "too_large"),
        ([a_jpeg(1) + bytes(MAX_PAYLOAD_BYTES)], {}, "too_large"),
    ],
)
def test_an_unusable_image_is_rejected_and_nothing_is_stored(
    line: Line, peer: Peer, payload: list[bytes], fields: dict[str, Any], code: str
) -> None:
    header = line.inspect(**fields)
    answer = peer.ask(header, *payload)
    assert (answer["type"], answer["code"]) == ("rejected", code)
    assert line.rows("SELECT count(*) FROM inspections WHERE image_id = ?", header["id"]) == [(0,)]


def quarantined(line: Line, image_id: str) -> list[bytes]:
    folder = line.folder / "data" / "quarantine"
    return [path.read_bytes() for path in folder.glob(f"*{image_id}*")] if folder.is_dir() else []


def test_the_bytes_of_a_bad_image_are_kept_in_the_quarantine(line: Line, peer: Peer) -> None:
    truncated, wrong = line.inspect(), line.inspect(sha256="0" * 64)
    assert peer.ask(truncated, a_jpeg(1)[:-100])["code"] == "bad_image"
    assert peer.ask(wrong, a_jpeg(1))["code"] == "bad_image"
    assert quarantined(line, truncated["id"]) == [a_jpeg(1)[:-100]]
    assert quarantined(line, wrong["id"]) == [a_jpeg(1)]


def test_damage_that_only_decoding_finds_is_unknown_and_kept(line: Line) -> None:
    whole = encoded(picture(), "PNG")
    damaged = whole[:-200] + bytes(100) + whole[-100:]
    message = line.result(image_id := line.send(damaged))
    assert (message["verdict"], message["reason"], message["defect"], message["stages"]) == (
        "unknown", "bad_image", None, [],
    )  # fmt: skip
    line.wait(lambda: quarantined(line, image_id) == [damaged])
    assert line.status()["state"] == "ready"


# --- back-pressure -----------------------------------------------------------------------------------------------


def test_draining_answers_busy_after_all_checks_and_duplicates_still(line: Line, peer: Peer) -> None:
    accepted, fresh = line.inspect(), line.inspect()
    assert peer.ask(accepted, a_jpeg(8))["type"] == "accepted"
    answer = line.control("drain")
    assert (answer["type"], line.status()["state"]) == ("ok", "draining")
    try:
        assert peer.ask(accepted, a_jpeg(8))["type"] == "duplicate"
        assert peer.ask(fresh, b"no image")["code"] == "bad_image"
        assert peer.ask(fresh | {"component": 5}, a_jpeg(9))["code"] == "bad_field"
        busy = peer.ask(fresh, a_jpeg(9))
        assert set(busy) >= keys("type id source credit retry_after_ms")
        assert (busy["type"], busy["id"], busy["source"]) == ("busy", fresh["id"], "cam-1")
        assert isinstance(busy["retry_after_ms"], int)
        assert busy["retry_after_ms"] > 0
        assert busy["credit"] >= 1
        line.idle()
    finally:
        line.control("drain", off=True)
    assert line.status()["state"] == "ready"
    assert peer.ask(fresh, a_jpeg(9))["type"] == "accepted"


def test_a_full_backlog_and_spent_credit_answer_busy_and_every_message_is_answered(line: Line) -> None:
    before = line.control("limits")
    for name in ("backlog_images", "backlog_bytes", "source_images_per_s", "source_bytes_per_s"):
        assert line.control("limits", **{name: 10**15})["code"] == "bad_field", name
    assert line.control("limits") == before
    assert line.control("limits", backlog_images=3, source_images=3)["type"] == "ok"
    headers: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    with line.peer() as flood:
        while not any(answer["type"] == "busy" for answer in answers):  # where the line is faster than we are
            more = [line.inspect() for _ in range(40)]
            for header in more:
                flood.send(header, a_jpeg(1))
            answers += [flood.take() for _ in more]
            headers += more
        assert flood.silent()
    assert {answer["type"] for answer in answers} == {"accepted", "busy"}
    assert sorted(answer["id"] for answer in answers) == sorted(header["id"] for header in headers)
    assert all(answer["credit"] >= 1 for answer in answers)
    assert all(answer["retry_after_ms"] > 0 for answer in answers if answer["type"] == "busy")
    line.control("limits", **{name: before[name] for name in ("backlog_images", "source_images")})
    accepted = [answer["id"] for answer in answers if answer["type"] == "accepted"]
    line.idle()
    assert line.rows("SELECT count(*) FROM inspections WHERE image_id = ?", accepted[0]) == [(1,)]


# --- results -----------------------------------------------------------------------------------------------------


def test_results_since_pages_through_everything_without_gaps(line: Line, peer: Peer) -> None:
    for number in range(3):
        line.send(board={"type": "pair", "serial": f"page-{number // 2}"})
    line.idle()
    last_seq = peer.ask({"type": "hello"})["last_seq"]
    page = peer.ask({"type": "results_since", "seq": 0, "id": "r", "source": "mes"})
    assert set(page) == keys("type id source credit items last_seq more oldest_seq")
    assert (page["type"], page["id"], page["source"], page["oldest_seq"]) == ("results", "r", "mes", 1)
    assert page["last_seq"] == page["items"][-1]["seq"]
    assert len(page["items"]) <= 100
    two = peer.ask({"type": "results_since", "seq": 1, "limit": 2})
    assert [item["seq"] for item in two["items"]] == [2, 3]
    assert (two["last_seq"], two["more"]) == (3, True)
    assert [item["seq"] for item in line.stream()] == list(range(1, last_seq + 1))
    end = peer.ask({"type": "results_since", "seq": last_seq})
    assert (end["items"], end["last_seq"], end["more"]) == ([], last_seq, False)
    beyond = peer.ask({"type": "results_since", "seq": 2**63 - 1})
    assert (beyond["items"], beyond["last_seq"], beyond["more"]) == ([], 2**63 - 1, False)


@pytest.mark.parametrize("wrong", [{}, {"seq": -1}, {"seq": 0, "limit": 1001}], ids=json.dumps)
def test_results_since_refuses_bad_arguments(peer: Peer, wrong: dict[str, Any]) -> None:
    answer = peer.ask({"type": "results_since", "id": "r", "source": "mes"} | wrong)
    assert (answer["type"], answer["code"], answer["id"], answer["source"]) == ("rejected", "bad_field", "r", "mes")


def test_messages_have_the_documented_fields_and_equal_what_results_since_repeats(line: Line) -> None:
    board = {"type": "named", "serial": "Z/ä ~1", "lot": "L 1", "station": "ST"}
    topic = "named/Z%2F%C3%A4%20%7E1/"
    published: list[tuple[str, dict[str, Any]]] = []
    with line.listener("inspection/" + topic, "board/" + topic, "heartbeat/") as listener:
        listener.until_heartbeat()
        sent = [line.send(board=board, designator=d, component=c) for d, c in (("P1", "P"), ("F1", "F"), ("P2", "P"))]
        while len(published) < 4:
            message = listener.take()
            if message[0] != "heartbeat/":
                published.append(message)
    repeated = [m for m in line.stream() if m["board"]["serial"] == board["serial"]]
    assert [{"topic": name, **body} for name, body in published] == repeated
    images, closed = {m["id"]: m for m in repeated[:3]}, repeated[3]
    assert set(images) == set(sent)
    for message in images.values():
        assert set(message) == keys(INSPECTION)
        assert message["topic"] == "inspection/" + topic
        assert TIME.fullmatch(message["at"])
        assert message["board"] == board | {"attempt": 1}
        assert message["late"] is False
        assert message["latency_ms"] > 0
        for stage in message["stages"]:
            assert set(stage) == keys(STAGE)
            assert re.fullmatch(r"[0-9a-f]{12}", stage["version"])
            assert (stage["device"], type(stage["batch"])) == ("cpu", int)
            assert all(isinstance(stage[name], float) for name in ("queued_ms", "load_ms", "infer_ms"))
    passed, failed = images[sent[0]], images[sent[1]]
    assert (passed["verdict"], passed["defect"], passed["reason"], len(passed["stages"])) == ("pass", None, None, 1)
    assert (failed["verdict"], failed["reason"], len(failed["stages"])) == ("fail", None, 2)
    assert isinstance(failed["defect"], str)
    assert {key: value for key, value in closed.items() if key not in {"at", "seq"}} == {
        "topic": "board/" + topic,
        "board": board | {"attempt": 1},
        "verdict": "fail",
        "expected": 3,
        "inspected": 3,
        "failed": [{"designator": "F1", "component": "F", "defect": failed["defect"]}],
        "review": [],
        "unknown": [],
        "missing": [],
        "reason": "complete",
        "rules_version": failed["rules_version"],
        "edition": failed["edition"],
    }


def test_a_heartbeat_comes_every_second_and_repeats_the_last_seq(line: Line, peer: Peer) -> None:
    line.idle()
    with line.listener("heartbeat/") as listener:
        beats = [listener.take(), listener.take()]
        while not 0.8 < beats[-1][1]["uptime_s"] - beats[-2][1]["uptime_s"] < 1.2:  # one of them was held up
            beats.append(listener.take())
    for topic, body in beats:
        assert topic == "heartbeat/"
        assert set(body) == keys("seq at state backlog uptime_s line epoch")
        assert (body["seq"], body["state"], body["backlog"]) == (peer.ask({"type": "hello"})["last_seq"], "ready", 0)
        assert TIME.fullmatch(body["at"])


@pytest.mark.promise("Nothing accepted is lost", "An image that was not judged is `unknown`, never a pass")
def test_a_deadline_that_has_passed_gives_unknown_never_a_pass(line: Line) -> None:
    missed, met = line.send(deadline_ms=1), line.send(deadline_ms=600_000)
    message = line.result(missed)
    assert (message["verdict"], message["reason"], message["defect"]) == ("unknown", "deadline", None)
    assert line.result(met)["verdict"] == "pass"


# --- boards ------------------------------------------------------------------------------------------------------


def test_attempts_follow_each_other_and_may_be_named(line: Line) -> None:
    def send(designator: str, component: str = "P", attempt: int | None = None) -> int:
        board = {"type": "named", "serial": "attempts", "attempt": attempt}
        return line.result(line.send(board=board, designator=designator, component=component))["board"]["attempt"]

    assert [send("P1"), send("P2"), send("F1", "F")] == [1, 1, 1]
    assert send("P1") == 2
    assert send("P1", attempt=5) == 5  # newer than all: it opens, although attempt 2 is not closed
    assert send("P2", attempt=2) == 2
    assert send("F1", "F", attempt=2) == 2
    with line.peer() as peer:
        header = line.inspect(board={"type": "named", "serial": "attempts", "attempt": 2}, designator="P2")
        refused = peer.ask(header, a_jpeg(1))
    assert (refused["type"], refused["code"]) == ("rejected", "attempt_closed")  # nothing is missing there
    assert [m["board"]["attempt"] for m in line.boards("attempts", 2)] == [1, 2]


def test_a_time_limit_closes_and_late_images_fill_the_gap_of_that_attempt(line: Line) -> None:
    quick = {"type": "quick", "serial": line.begun_in_time("quick", "late", designator="P1")}
    timed = {"type": "timed", "serial": line.begun_in_time("timed", "late-too", designator="A")}
    (closed,) = line.boards(quick["serial"])
    assert {key: closed[key] for key in ("verdict", "expected", "inspected", "failed", "missing", "reason")} == {
        "verdict": "unknown",
        "expected": 2,
        "inspected": 1,
        "failed": [],
        "missing": [{"component": "P", "count": 1, "designators": ["P2"]}],
        "reason": "time_limit",
    }
    late = line.result(line.send(board=quick, designator="P2"))
    assert (late["late"], late["board"]["attempt"], late["verdict"]) == (True, 1, "pass")
    again = line.result(line.send(board=quick, designator="P2"))
    assert (again["late"], again["board"]["attempt"]) == (False, 2)
    (closed,) = line.boards(timed["serial"])
    assert closed["missing"] == [{"component": "P", "count": 1}]
    assert line.result(line.send(board=timed, designator="B"))["late"] is True
    first = "SELECT verdict, inspected FROM boards WHERE serial = ? AND attempt = 1"
    assert line.rows(first, quick["serial"]) == [("unknown", 1)]


# --- control -----------------------------------------------------------------------------------------------------


def test_status_has_the_documented_fields(line: Line) -> None:
    status = line.status()
    assert set(status) == {"type"} | keys(
        "version uptime_s state accepted completed backlog images_per_s policy rules_version edition expert_switches"
        " last_seq last_error last_error_at line epoch executors pools"
    )
    assert (status["type"], status["state"], status["policy"]) == ("ok", "ready", "coserve-plus")
    (executor,) = status["executors"]
    assert set(executor) == keys("name device pool resident used_bytes budget_bytes queued busy_share")
    assert (executor["device"], executor["budget_bytes"]) == ("cpu", 150_000_000)
    assert 0 < executor["used_bytes"] <= 150_000_000
    assert 0 <= executor["busy_share"] <= 1
    assert "R0402" in executor["resident"]
    (pool,) = status["pools"]
    assert set(pool) == keys("pool device executors experts used_bytes budget_bytes queued")
    assert (pool["executors"], pool["experts"]) == ([executor["name"]], len(executor["resident"]))


def test_experts_queues_pins_and_limits(line: Line) -> None:
    experts = line.control("experts")
    assert {entry["expert"] for entry in experts["experts"]} == {"R0402", "C0603", "QFP64", "yolo-solder"}
    assert line.control("queues")["queues"] == []
    assert line.control("pin", expert="R0402", device="cpu")["type"] == "ok"
    for kind in ("pin", "unpin", "unload"):
        for fields in ({"expert": "stranger"}, {"expert": "R0402", "device": "cuda:9"}, {}, {"expert": 5}):
            answer = line.control(kind, **fields)
            assert set(answer) == {"type", "code", "reason"}, (kind, fields)
            assert answer["type"] == "error"
    assert line.control("unload", expert="R0402")["type"] == "error"
    assert line.control("unpin", expert="R0402")["type"] == "ok"
    assert line.control("unload", expert="R0402")["type"] == "ok"
    line.wait(lambda: "R0402" not in line.status()["executors"][0]["resident"])
    assert line.result(line.send())["verdict"] == "pass"
    assert line.control("limits", expert_memory={"cpu": 60_000_000})["type"] == "ok"
    line.wait(lambda: line.status()["executors"][0]["budget_bytes"] == 60_000_000)
    assert line.status()["executors"][0]["used_bytes"] <= 60_000_000
    assert line.control("limits", expert_memory={"cpu": 1})["type"] == "error"
    assert "backlog_pictures" in line.control("limits", backlog_pictures=5)["reason"]
    assert line.control("limits", expert_memory={"cpu": 100_000_000})["type"] == "ok"
    assert line.control("pin", expert="R0402")["type"] == "ok"
    assert line.control("pin", expert="C0603")["type"] == "error"  # both would fit, but no third beside them
    assert line.control("unpin", expert="R0402")["type"] == "ok"
    assert line.control("limits", expert_memory={"cpu": 150_000_000})["type"] == "ok"


def test_control_answers_what_it_cannot_read_with_an_error(line: Line) -> None:
    with Peer(f"ipc://{line.folder}/run/control.sock") as peer:
        assert peer.ask({"type": "drain", "off": "no"})["code"] == "bad_field"
        for frames in ([b"CS1", b"{"], [b"CS2", HELLO], [b"CS1"], [b"CS1", b'{"type": "no such"}'], [b"CS1", b"{}"]):
            answer = peer.frames(*frames)
            assert set(answer) == {"type", "code", "reason"}
            assert answer["type"] == "error"
    with Peer(f"ipc://{line.folder}/run/control.sock", zmq.REQ) as peer:
        assert peer.ask({"type": "status"})["type"] == "ok"


@pytest.mark.promise("Containment", "If rules or a catalog have mistakes, the old ones stay in force")
def test_reload_keeps_the_old_rules_on_error_and_sighup_reloads(line: Line, request: pytest.FixtureRequest) -> None:
    before = line.status()["rules_version"]
    line.write_rules(RULES.replace("review_below", "review_under"))
    answer = line.control("reload")
    assert answer["type"] == "error"
    assert re.search(r"rules\.yaml:\d+:\d+.*review_under", answer["reason"])
    assert line.status()["rules_version"] == before
    line.write_rules(RULES.replace("named:", "renamed:"))
    assert line.control("reload")["type"] == "ok"
    after = line.status()["rules_version"]
    assert after != before
    try:
        with line.peer() as peer:
            fresh = peer.ask(line.inspect(board={"type": "named", "serial": "newer"}), a_jpeg(1))
            assert fresh["code"] == "unknown_board"
        line.send(board={"type": "renamed", "serial": "newer"}, designator="P1")
        assert {version for (version,) in line.rows("SELECT rules_version FROM rules_versions")} == {before, after}
    finally:
        line.write_rules(RULES)
        os.kill(owner(line), signal.SIGHUP)
        line.wait(lambda: line.status()["rules_version"] == before)


def test_a_reload_names_the_settings_that_wait_for_a_restart(line: Line) -> None:
    text = line.config.read_text(encoding="utf-8")
    try:
        assert line.control("reload")["restart_for"] == []
        line.config.write_text(text + "retention: {images_for: 90d}\n", encoding="utf-8")
        done = coserve("reload", "--config", line.config)
        assert "coserve.yaml has changed: restart the daemon for retention.images_for" in " ".join(done.output.split())
        line.config.write_text(text + "retentoin: {}\n", encoding="utf-8")
        answer = line.control("reload")
        assert answer["restart_for"] == []
        assert "retentoin" in answer["settings_problems"][0]
    finally:
        line.config.write_text(text, encoding="utf-8")


def owner(line: Line) -> int:
    """Return the process number that the lock names."""
    return int((line.folder / "data" / "journal" / ".lock").read_text().splitlines()[0])


def test_sockets_files_and_folders_have_their_modes(line: Line) -> None:
    def mode(name: str | Path) -> int:
        return stat.S_IMODE((line.folder / name).stat().st_mode)

    line.send(component="V")
    with line.peer() as peer:
        assert peer.ask(line.inspect(), a_jpeg(1)[:-9])["code"] == "bad_image"
    line.wait(lambda: line.rows("SELECT 1 FROM inspections WHERE image_path IS NOT NULL"))
    for name in ("run/intake.sock", "run/control.sock", "run/results.sock"):
        assert mode(name) == 0o660, name
    (segment, *_) = (line.folder / "data" / "journal").glob("segment-*.journal")
    for name in ("inspection.db", segment):
        assert mode(name) == 0o640, name
    for name in ("run", "data", "data/journal", "data/quarantine", "images"):
        assert mode(name) == 0o750, name


# --- the process -------------------------------------------------------------------------------------------------


def a_start(config: Path, command: Sequence[str] = DAEMON, **environ: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", *command, str(config)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ},
    )  # fmt: skip


def refusal(start: "subprocess.Popen[str]") -> str:
    """Return the only line that a daemon prints when it refuses to start."""
    stdout, stderr = start.communicate(timeout=PATIENCE_S)
    assert (start.returncode, stdout) == (2, ""), stderr
    (reason,) = stderr.splitlines()
    return reason


@pytest.mark.promise("Nothing accepted is lost", "One daemon per database and per journal")
def test_a_second_daemon_exits_with_2_and_one_line_that_names_the_first(line: Line) -> None:
    assert str(owner(line)) in refusal(a_start(line.config))
    assert line.status()["type"] == "ok"


def test_what_cannot_start_exits_with_2_and_one_line(tmp_path: Path, line: Line, experts_folder: Path) -> None:
    taken = line.endpoints["intake"][1]
    refused = [
        ("CURVE", {"COSERVE_ENDPOINTS_INTAKE": "[tcp://0.0.0.0:5570]"}),
        (taken, {"COSERVE_ENDPOINTS_RESULTS": taken}),
    ]
    config = Line(tmp_path, experts_folder).config
    for why, environ in refused:
        assert why in refusal(a_start(config, **environ))


def test_the_state_is_starting_until_the_daemon_says_that_it_is_ready(tmp_path: Path, experts_folder: Path) -> None:
    line = Line(tmp_path / "line", experts_folder)
    command = [sys.executable, "-c", HOLDABLE, str(line.config), str(tmp_path)]
    (tmp_path / "load").touch()
    with (tmp_path / "log").open("w") as log, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True
    ) as process:  # fmt: skip
        try:
            line.wait((line.folder / "run" / "control.sock").exists)
            assert line.status()["state"] == "starting"
            (tmp_path / "load").unlink()
            assert process.stdout is not None
            assert process.stdout.readline().startswith("coserve ready")
            assert line.status()["state"] == "ready"
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


@pytest.mark.promise("Nothing accepted is lost", "`seq` has no gap and no repeat, across restarts")
def test_a_restart_goes_on_where_the_line_stopped(tmp_path: Path, experts_folder: Path) -> None:
    line = Line(tmp_path / "line", experts_folder, limits={"credit": 64})
    service = line.service()
    service.start()
    down = line.begun_in_time("timed", "down", designator="A")
    before = line.stream()
    headers = [line.inspect(board={"type": "pair", "serial": f"w{n}"}, component="P") for n in range(20)]
    headers += [line.inspect(deadline_ms=2000) for _ in range(20)]
    headers += [line.inspect(board={"type": "named", "serial": f"g{n}"}, designator="F1", component="F") for n in "ab"]
    with line.held("R0402"):  # what has no verdict when the power goes
        with line.peer() as peer:
            for number, header in enumerate(headers):
                peer.send(header, a_jpeg(number))
            for _ in headers:
                assert peer.take()["type"] == "accepted"
        service.kill()
    time.sleep(2.2)
    with line.service():
        line.idle()
        stream = line.stream()
        assert stream[: len(before)] == before
        assert [message["seq"] for message in stream] == list(range(1, len(stream) + 1))
        verdicts = {m["id"]: (m["verdict"], m["reason"]) for m in stream if "id" in m}
        assert len(verdicts) == sum("id" in m for m in stream)
        assert {verdicts[h["id"]] for h in headers if "deadline_ms" in h} == {("unknown", "deadline")}
        assert {verdicts[h["id"]] for h in headers if "deadline_ms" not in h} == {("pass", None), ("fail", None)}
        (closed,) = line.boards(down)
        assert (closed["reason"], closed["verdict"], closed["inspected"]) == ("time_limit", "unknown", 1)
        with line.peer() as peer:
            assert peer.ask(headers[0], a_jpeg(0))["type"] == "duplicate"
            assert peer.ask({"type": "hello"})["last_seq"] == len(stream)
        status = line.status()
        assert (status["accepted"], status["backlog"]) == (0, 0)


@pytest.mark.parametrize("how", ["reload", "reload --now", "reload --now without a daemon"])
def test_what_waits_is_judged_by_its_own_edition_unless_that_is_ended(
    tmp_path: Path, experts_folder: Path, how: str
) -> None:
    line = Line(tmp_path / "line", experts_folder)
    service = line.service()
    service.start()
    with line.held("QFP64"):
        waiting = [line.send(component="F") for _ in range(5)]
        line.forget("F", "QFP64")
        if how.endswith("daemon"):
            service.kill()
            coserve("reload", "--now", "--config", line.config)
        elif how.endswith("--now"):
            assert line.control("reload", now=True)["edition"] == 2
            assert line.control("adopt", edition=1)["code"] == "bad_edition"
            line.wait(lambda: [line.result(image)["reason"] for image in waiting] == ["edition_gone"] * 5)
        else:
            assert line.control("reload")["edition"] == 2
        service.kill()
    with line.service():
        late = line.send(component="P")
        results = [line.result(image) for image in (*waiting, late)]
        assert {(row["edition"], row["board"]["attempt"]) for row in results} == {(1, 1)}
        expected = ("fail", None) if how == "reload" else ("unknown", "edition_gone")
        assert {(row["verdict"], row["reason"]) for row in results[:5]} == {expected}
        assert results[5]["reason"] == expected[1]
        fresh = {"type": "free", "serial": "S1", "attempt": 2}
        with line.peer() as peer:
            assert peer.ask(line.inspect(component="F", board=fresh), a_jpeg(1))["code"] == "unknown_component"
            answer = peer.ask(line.inspect(board=fresh, id="fresh"), a_jpeg(2))
        assert (answer["type"], answer["edition"]) == ("accepted", 2)
        assert line.result("fresh")["verdict"] == "pass"


@pytest.mark.promise(
    "Nothing accepted is lost",
    "A stop ends within its time limit; unfinished images stay in the journal",
)
def test_sigterm_ends_the_daemon_with_status_0_and_what_waits_stays(tmp_path: Path, experts_folder: Path) -> None:
    line = Line(tmp_path / "line", experts_folder)
    service = line.service()
    service.start()
    with line.peer() as peer:
        for number in range(60):
            peer.send(line.inspect(component="PVF"[number % 3]), a_jpeg(number))
        answers = [peer.take()["type"] for _ in range(60)]
    assert set(answers) == {"accepted"}
    assert service.stop() == 0
    assert line.rows("SELECT count(*) FROM inspections") == [(60,)]
    assert list((line.folder / "run").iterdir()) == []
    with line.service():
        line.idle()
    assert line.rows("SELECT count(verdict) FROM inspections") == [(60,)]
