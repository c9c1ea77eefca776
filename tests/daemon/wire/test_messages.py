"""PROTOCOL.md, Frames: every rule of frames, header and fields, and the code that breaking it earns."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.records import BoardRef, Pixels
from daemon.wire.messages import (
    Generate,
    Hello,
    Inspect,
    MessageError,
    ResultsSince,
    parse,
    results_answer,
    split_envelope,
)
from tests.daemon.wire.wire_parts import an_inspect, frames_of


def refusal(frames: list[bytes]) -> MessageError:
    with pytest.raises(MessageError) as caught:
        parse(frames)
    return caught.value


def code_of(header: dict[str, Any] | bytes) -> str:
    return refusal(frames_of(header)).code


def inspected(**fields: Any) -> Inspect:
    message, _ = parse(frames_of(an_inspect(**fields), b"x"))
    assert isinstance(message, Inspect)
    return message


def test_an_inspect_with_every_field_is_read() -> None:
    board = {"type": "main board", "serial": "Ä-1", "lot": "L", "station": "S2", "attempt": 3, "colour": "green"}
    message = inspected(
        board=board,
        designator="R12",
        captured_at="2026-11-21T10:28:11.1239+01:00",
        deadline_ms=86_400_000,
        sha256="AB" * 32,
        encoding="raw",
        shape=[2, 3, 1],
        dtype="uint8",
        weather={"rain": [1.5, None]},
    )
    assert message == Inspect(
        image_id="i1",
        source="cam-1",
        board=BoardRef("main board", "Ä-1", "L", "S2", 3),
        component="R0402",
        designator="R12",
        captured_at="2026-11-21T09:28:11.123Z",
        deadline_ms=86_400_000,
        sha256="ab" * 32,
        pixels=Pixels("raw", (2, 3, 1)),
    )


def test_absent_fields_and_null_fields_take_their_defaults() -> None:
    header = {**an_inspect(), "designator": None, "deadline_ms": None, "encoding": None, "shape": None}
    message, payload = parse(frames_of(header))
    assert isinstance(message, Inspect)
    assert message.designator == "i1"
    assert (message.deadline_ms, message.pixels, payload) == (None, Pixels(), None)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"CS1"],
        [b"XX1", b"{}"],
        [b"", b"{}"],
        [b"CS", b"{}"],
        [b"CSx", b"{}"],
        [b"cs1", b"{}"],
        [b"CS1", b""],
        [b"CS1", b"", b"x"],
        [b"CS1", b"{}", b"x", b"y"],
    ],
)
def test_wrong_frames_are_bad_frames(frames: list[bytes]) -> None:
    assert refusal(frames).code == "bad_frames"


@pytest.mark.parametrize("magic", [b"CS2", b"CS0", b"CS10", b"CS999999999999"])
def test_another_number_is_an_unsupported_version(magic: bytes) -> None:
    assert refusal([magic, b"{}"]).code == "unsupported_version"


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'"text"',
        b"null",
        b"{} {}",
        b"{",
        b'{"a": 1,}',
        b'{"a": 1, "a": 1}',
        b'{"board": {"type": "x", "type": "y"}}',
        b'{"a": [{"b": 1, "b": 2}]}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\x01"}',
        b'{"a": 01}',
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"a":' * 6_000 + b"1" + b"}" * 6_000,
        b'{"a": "' + b"x" * 65_536 + b'"}',
    ],
)
def test_what_is_not_one_strict_json_object_is_a_bad_header(header: bytes) -> None:
    assert code_of(header) == "bad_header"


def test_a_header_of_exactly_64_kib_is_read_and_one_byte_more_is_not() -> None:
    raw = json.dumps(an_inspect()).encode()
    assert isinstance(parse(frames_of(raw + b" " * (65_536 - len(raw))))[0], Inspect)
    assert code_of(raw + b" " * (65_537 - len(raw))) == "bad_header"


@pytest.mark.parametrize(
    "fields",
    [
        {"type": None},
        {"type": "inspekt"},
        {"type": 5},
        {"type": ["inspect"]},
        {"id": None},
        {"id": ""},
        {"id": "a b"},
        {"id": "a\n"},
        {"id": "ä"},
        {"id": "x" * 129},
        {"id": 7},
        {"id": "\ud800"},
        {"source": None},
        {"source": "a*"},
        {"source": True},
        {"board": None},
        {"board": "mainboard-a"},
        {"board": []},
        {"board": {"type": "a"}},
        {"board": {"serial": "a"}},
        {"board": {"type": None, "serial": "a"}},
        {"board": {"type": "", "serial": "a"}},
        {"board": {"type": "a", "serial": "x" * 129}},
        {"board": {"type": "a", "serial": "x\ty"}},
        {"board": {"type": "a", "serial": "x\x7f"}},
        {"board": {"type": "a", "serial": "x\x85"}},
        {"board": {"type": "a", "serial": "\udfff"}},
        {"board": {"type": "a", "serial": 12}},
        {"board": {"type": "a", "serial": "b", "lot": 1}},
        {"board": {"type": "a", "serial": "b", "station": ""}},
        {"board": {"type": "a", "serial": "b", "attempt": 0}},
        {"board": {"type": "a", "serial": "b", "attempt": 1.0}},
        {"board": {"type": "a", "serial": "b", "attempt": True}},
        {"board": {"type": "a", "serial": "b", "attempt": "1"}},
        {"board": {"type": "a", "serial": "b", "attempt": 2**63}},
        {"board": {"type": "a", "serial": "b", "attempt": 10**4000}},
        {"component": None},
        {"component": 1},
        {"component": "a\x00"},
        {"designator": ""},
        {"designator": 1},
        {"captured_at": "yesterday"},
        {"captured_at": 0},
        {"captured_at": "2026-11-21"},
        {"captured_at": "2026-11-21 09:28:11Z"},
        {"captured_at": "2026-11-21T09:28:11"},
        {"captured_at": "2026-02-29T09:28:11Z"},
        {"captured_at": "2026-11-21T24:00:00Z"},
        {"captured_at": "2026-11-21T09:28:60Z"},
        {"captured_at": "2026-11-21T09:28:11+24:00"},
        {"captured_at": "2026-11-21T09:28:11Z\n"},
        {"captured_at": "٢026-11-21T09:28:11Z"},
        {"captured_at": "0001-01-01T00:00:00+01:00"},
        {"deadline_ms": 0},
        {"deadline_ms": -1},
        {"deadline_ms": 86_400_001},
        {"deadline_ms": 10.0},
        {"deadline_ms": 1e3},
        {"deadline_ms": "10"},
        {"deadline_ms": False},
        {"sha256": "ab"},
        {"sha256": "g" * 64},
        {"sha256": 5},
        {"encoding": "jpeg"},
        {"encoding": 1},
        {"encoding": "raw"},
        {"encoding": "raw", "shape": [1, 1, 1]},
        {"encoding": "raw", "dtype": "uint8"},
        {"encoding": "raw", "shape": [1, 1, 1], "dtype": "uint16"},
        {"encoding": "raw", "shape": [1, 1, 4], "dtype": "uint8"},
        {"encoding": "raw", "shape": [1, 1], "dtype": "uint8"},
        {"encoding": "raw", "shape": [1, 1.0, 1], "dtype": "uint8"},
        {"encoding": "raw", "shape": [-1, 1, 1], "dtype": "uint8"},
        {"encoding": "raw", "shape": [True, 1, 1], "dtype": "uint8"},
        {"encoding": "raw", "shape": "1,1,1", "dtype": "uint8"},
    ],
)
def test_a_wrong_field_is_a_bad_field(fields: dict[str, Any]) -> None:
    assert code_of({**an_inspect(), **fields}) == "bad_field"


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("2026-11-21T09:28:11Z", "2026-11-21T09:28:11.000Z"),
        ("2026-11-21t09:28:11.5z", "2026-11-21T09:28:11.500Z"),
        ("2026-01-01T00:30:00.0019+01:00", "2025-12-31T23:30:00.001Z"),
        ("2026-11-21T09:28:11-00:00", "2026-11-21T09:28:11.000Z"),
        ("2016-12-31T23:59:60Z", "2016-12-31T23:59:59.999Z"),
        ("2017-01-01T05:29:60+05:30", "2016-12-31T23:59:59.999Z"),
        ("0999-01-01T00:00:00Z", "0999-01-01T00:00:00.000Z"),
    ],
)
def test_the_camera_time_becomes_utc_with_milliseconds(sent: str, kept: str) -> None:
    assert inspected(captured_at=sent).captured_at == kept


def test_unnamed_fields_may_hold_any_json() -> None:
    header = json.dumps(an_inspect())[:-1] + ', "x": 1' + "0" * 5000 + ', "y": "\\ud800", "\\udc00": -0.0e1}'
    assert isinstance(parse(frames_of(header.encode()))[0], Inspect)


def test_id_and_source_come_back_only_where_they_are_legal() -> None:
    error = refusal(frames_of({**an_inspect(), "source": 5, "component": None}))
    assert (error.image_id, error.source) == ("i1", None)
    error = refusal([b"CS2", json.dumps(an_inspect()).encode()])
    assert (error.image_id, error.source) == ("i1", "cam-1")
    error = refusal([b"CS1", json.dumps(an_inspect()).encode(), b"", b""])
    assert (error.image_id, error.source) == ("i1", "cam-1")
    error = refusal(frames_of(b'{"id": "a", "source": "b", "x": NaN}'))
    assert (error.image_id, error.source) == ("a", "b")
    error = refusal(frames_of(b'{"id": "a", "id": "b", "source": "c"}'))
    assert (error.image_id, error.source) == (None, "c")


def test_a_reason_is_short_and_ascii_whatever_was_sent() -> None:
    error = refusal(frames_of(an_inspect("ü\ud800" * 5000)))
    assert error.reason.isascii()
    assert len(error.reason) < 400


def test_hello_and_results_since_are_read() -> None:
    assert parse(frames_of({"type": "hello", "id": "h"}))[0] == Hello("h", None)
    assert parse(frames_of({"type": "results_since", "seq": 0}))[0] == ResultsSince(None, None, 0, 100)
    asked, _ = parse(frames_of({"type": "results_since", "seq": 2**63 - 1, "limit": 1000, "source": "plc"}))
    assert asked == ResultsSince(None, "plc", 2**63 - 1, 1000)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seq": None},
        {"seq": -1},
        {"seq": 1.0},
        {"seq": "1"},
        {"seq": True},
        {"seq": 2**63},
        {"seq": 1, "limit": 0},
        {"seq": 1, "limit": 1001},
        {"seq": 1, "limit": "5"},
    ],
)
def test_bad_arguments_of_results_since_are_bad_fields(fields: dict[str, Any]) -> None:
    assert code_of({"type": "results_since", **fields}) == "bad_field"


def test_generate_is_read_and_checked() -> None:
    header = {"type": "generate", "id": "g", "source": "s", "model": "m", "prompt": "why\n?", "stream": True}
    assert parse(frames_of(header))[0] == Generate("g", "s", "m", "why\n?", None, None, None, None, stream=True)
    for wrong in (
        {"prompt": None},
        {"model": 1},
        {"stream": "yes"},
        {"max_new_tokens": 0},
        {"slo_ms": 1.5},
        {"board": "b"},
        {"task": 3},
        {"prompt": "\ud800"},
    ):
        assert code_of({**header, **wrong}) == "bad_field"


def test_the_envelope_of_req_and_of_proxies_is_parted_from_the_message() -> None:
    message = [b"CS1", b"{}", b""]
    assert split_envelope(message) == ([], message)
    assert split_envelope([b"", *message]) == ([b""], message)
    assert split_envelope([b"\0abcd", b"", *message]) == ([b"\0abcd", b""], message)
    assert split_envelope([b"1234", b"", *message]) == ([b"1234", b""], message)
    assert split_envelope([b"XX1", b""]) == ([], [b"XX1", b""])
    assert split_envelope([b"1234", b""]) == ([], [b"1234", b""])
    assert split_envelope([b"12345", b"", *message]) == ([], [b"12345", b"", *message])
    assert split_envelope([]) == ([], [])
    assert split_envelope([b"CS1", b"", b"CS1"]) == ([], [b"CS1", b"", b"CS1"])


def test_results_are_cut_to_one_header_and_the_rest_is_announced() -> None:
    items = [{"seq": n, "topic": "t/", "text": "x" * 1000} for n in range(5, 205)]
    page = {"items": items, "last_seq": 204, "more": False, "oldest_seq": 1}
    header = results_answer(ResultsSince(None, "plc", 4, 1000), page, 7).header
    assert len(header) <= 65_536
    answer = json.loads(header)
    count = len(answer["items"])
    assert 50 < count < 70
    assert answer["items"] == items[:count]
    assert answer["last_seq"] == items[count - 1]["seq"]
    assert (answer["more"], answer["oldest_seq"], answer["source"]) == (True, 1, "plc")


def test_one_result_longer_than_a_header_still_goes_out() -> None:
    items = [{"seq": 1, "text": "x" * 100_000}, {"seq": 2}]
    page = {"type": "results", "items": items, "last_seq": 2, "more": False, "oldest_seq": 1}
    answer = json.loads(results_answer(ResultsSince(None, None, 0, 100), page, 1).header)
    assert [item["seq"] for item in answer["items"]] == [1]
    assert answer["more"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(frames=st.lists(st.sampled_from([b"", b"CS1", b"CS2", b"{}"]) | st.binary(max_size=200), max_size=5))
def test_any_frames_are_a_message_or_a_message_error(frames: list[bytes]) -> None:
    with suppress(MessageError):
        parse(frames)


@given(
    name=st.sampled_from(
        [*an_inspect(), "designator", "captured_at", "deadline_ms", "sha256", "encoding", "shape", "dtype"]
    ),
    value=json_values,
)
def test_any_value_of_any_field_is_read_or_refused(name: str, value: object) -> None:
    with suppress(MessageError):
        parse(frames_of({**an_inspect(), name: value}))
