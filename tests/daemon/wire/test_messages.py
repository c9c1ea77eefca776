"""PROTOCOL.md, Frames: every rule of frames, header and fields, and the code that breaking it earns."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from daemon.records import BoardRef, Generation, Image, Pixels
from daemon.wire.messages import (
    MessageError,
    ResultsSince,
    parse,
    results_answer,
    split_envelope,
)
from tests.contract.peer import frames_of
from tests.daemon.wire.wire_parts import an_inspect


def refusal(frames: list[bytes]) -> MessageError:
    with pytest.raises(MessageError) as caught:
        parse(frames)
    return caught.value


def code_of(header: dict[str, Any] | bytes) -> str:
    return refusal(frames_of(header)).code


def inspected(**fields: Any) -> Image:
    message, _ = parse(frames_of(an_inspect(**fields), b"x"))
    assert isinstance(message, Image)
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
    assert message == Image(
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


@pytest.mark.promise("Cameras", "Names that look alike are one: they are used, published and stored in Unicode's NFC")
def test_names_are_used_in_nfc():
    bare, composed = "Prüfe\u0301", "Prüf\xe9"
    board = {"type": bare, "serial": bare + "\u2029", "lot": bare, "station": bare, "attributes": {bare: bare}}
    used = inspected(board=board, component=bare, designator=bare)
    assert used.board == BoardRef(composed, composed, composed, composed, None, ((composed, composed),))
    assert (used.component, used.designator) == (composed, composed)
    assert inspected(component="e\u0301" * 128).component == "\xe9" * 128, "measured as it is used"


BAD_FRAMES = {
    "too few": [[], [b"CS1"]],
    "another protocol": [[b"XX1", b"{}"], [b"", b"{}"], [b"CS", b"{}"], [b"CSx", b"{}"], [b"cs1", b"{}"]],
    "an empty header": [[b"CS1", b""], [b"CS1", b"", b"x"]],
    "too many": [[b"CS1", b"{}", b"x", b"y"]],
}


@pytest.mark.parametrize("messages", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_wrong_frames_are_bad_frames(messages: list[list[bytes]]) -> None:
    assert [refusal(frames).code for frames in messages] == ["bad_frames"] * len(messages)


BAD_HEADERS = {
    "not JSON": [b"not json", b"{} {}", b"{", b'{"a": 1,}', b'{"a": "\x01"}', b'{"a": 01}'],
    "no object": [b"[]", b'"text"', b"null"],
    "a key twice": [b'{"a": 1, "a": 1}', b'{"board": {"type": "x", "type": "y"}}', b'{"a": [{"b": 1, "b": 2}]}'],
    "no number": [b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 1e999}'],
    "not UTF-8": [b"\xef\xbb\xbf{}", '{"a": 1}'.encode("utf-16"), b'{"a": "\xff"}', b'{"a": "\xed\xa0\x80"}'],
    "attributes that no reader may unpack": [
        b'{"board": {"attributes": {"a": "1", "a": "2"}}}',
        b'{"board": {"attributes": {"a": NaN}}}',
        b'{"board": {"attributes": {"a": 1e999}}}',
        b'{"board": {"attributes": ' + b'{"a": ' * 9_000 + b"1" + b"}" * 9_000 + b"}}",
        b'{"board": {"attributes": {' + b", ".join(b'"%d": ""' % number for number in range(100_000)) + b"}}}",
    ],
    "too deep": [b"[" * 60_000, b'{"a":' * 10_000, b'{"a":' * 6_000 + b"1" + b"}" * 6_000],
    "too long": [b'{"a": "' + b"x" * 65_536 + b'"}'],
}


@pytest.mark.parametrize("headers", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_what_is_not_one_strict_json_object_is_a_bad_header(headers: list[bytes]) -> None:
    assert [code_of(header) for header in headers] == ["bad_header"] * len(headers)


#: Values that are wrong, of each field, of each field of the board, and of what goes with raw pixels.
WRONG: dict[str, list[Any]] = {
    "type": [None, "inspekt", 5, ["inspect"]],
    "id": [None, "", "a b", "a\n", "ä", "x" * 129, 7, "\ud800"],
    "source": [None, "a*", True],
    "board": [None, "mainboard-a", [], {"type": "a"}, {"serial": "a"}],
    "component": [None, 1, "a\x00", "R\u200b1"],
    "designator": ["", 1, "R1\u2029"],
    "captured_at": [
        *("yesterday", 0, "2026-11-21", "2026-11-21 09:28:11Z", "2026-11-21T09:28:11", "2026-02-29T09:28:11Z"),
        *("2026-11-21T24:00:00Z", "2026-11-21T09:28:60Z", "2026-11-21T09:28:11+24:00", "2026-11-21T09:28:11Z\n"),
        *("٢026-11-21T09:28:11Z", "0001-01-01T00:00:00+01:00"),
    ],
    "deadline_ms": [0, -1, 86_400_001, 10.0, 1e3, "10", False],
    "sha256": ["ab", "g" * 64, 5],
    "encoding": ["jpeg", 1, "raw"],
}
WRONG_OF_BOARD: dict[str, list[Any]] = {
    "type": [None, ""],
    "serial": ["x" * 129, "x\ty", "x\x7f", "x\x85", "\udfff", 12, "A\u202eB", "A\u2028B", "\ufeffA", "A\xadB"],
    "lot": [1, "L\u2066"],
    "station": [""],
    "attempt": [0, 1.0, True, "1", 2**63, 10**4000],
    "attributes": [
        *("text", ["panel"], 5, {"panel": 7}, {"panel": True}, {"panel": ["x"]}, {"panel": {"deep": {}}}),
        *({"panel": "x" * 257}, {"panel": "a\nb"}, {"panel": "\ud800"}, {"panel": 10**4000}, {"panel": 1e300}),
        *({"": "x"}, {"p": "\u200d"}, {"x" * 129: "x"}, {"a\tb": "x"}, {"\ud800": "x"}),
        {f"key-{number}": "x" for number in range(33)},
        {f"key-{number}": "ü" * 256 for number in range(8)},
    ],
}
WRONG_OF_RAW: dict[str, list[Any]] = {
    "shape": [None, [1, 1, 4], [1, 1], [1, 1.0, 1], [-1, 1, 1], [True, 1, 1], "1,1,1"],
    "dtype": [None, "uint16"],
}


def each_alone(values: dict[str, list[Any]], **rest: Any) -> list[dict[str, Any]]:
    return [rest | {name: value} for name in values for value in values[name]]


@pytest.mark.parametrize(
    "fields",
    [
        *each_alone(WRONG),
        *({"board": board} for board in each_alone(WRONG_OF_BOARD, type="a", serial="b")),
        *each_alone(WRONG_OF_RAW, encoding="raw", shape=[1, 1, 1], dtype="uint8"),
    ],
    ids=lambda fields: ascii(fields)[:60],
)
def test_a_wrong_field_is_a_bad_field(fields: dict[str, Any]) -> None:
    assert code_of({**an_inspect(), **fields}) == "bad_field"


def test_attributes_are_texts_in_the_order_of_their_names() -> None:
    board = {
        "type": "a",
        "serial": "b",
        "attributes": {"panel": "P-17", "Auftrag": "Ä 4711", "empty": "", "gone": None},
    }
    assert inspected(board=board).board.attributes == (("Auftrag", "Ä 4711"), ("empty", ""), ("panel", "P-17"))
    most = {f"{number:02}": "x" * 119 for number in range(32)}  # 4,065 bytes of JSON
    assert len(inspected(board=board | {"attributes": most}).board.attributes) == 32


def test_a_wrong_attribute_is_named() -> None:
    board = {"type": "a", "serial": "b", "attributes": {"panel": 7}}
    assert refusal(frames_of(an_inspect(board=board))).reason.startswith('board.attributes."panel": expected a string')
    board["attributes"] = {str(number): "" for number in range(40)}
    assert 'at most 32 texts and 4096 bytes of JSON, got "40 with' in refusal(frames_of(an_inspect(board=board))).reason


@pytest.mark.parametrize(
    ("camera_time", "utc"),
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
def test_the_camera_time_becomes_utc_with_milliseconds(camera_time: str, utc: str) -> None:
    assert inspected(captured_at=camera_time).captured_at == utc


def test_a_reason_is_short_and_ascii_whatever_was_sent() -> None:
    error = refusal(frames_of(an_inspect("ü\ud800" * 5000)))
    assert error.reason.isascii()
    assert len(error.reason) < 400


def test_generate_is_read_and_checked() -> None:
    header = {"type": "generate", "id": "g", "source": "s", "model": "m", "prompt": "why\n?", "stream": True}
    message, _ = parse(frames_of(header))
    assert isinstance(message, Generation)
    assert asdict(message) == asdict(Generation("s", "g", "m", "why\n?", stream=True))
    wrong: dict[str, list[Any]] = {
        "id": [None],
        "source": ["a b"],
        "model": [None, 1],
        "prompt": [None, ["a"], "\ud800"],
        "max_new_tokens": [0, 1.5],
        "slo_ms": [1.5, "fast"],
        "stream": ["yes", 1],
        "board": ["b", {"type": "free"}],
        "task": [3],
    }
    for fields in each_alone(wrong):
        assert code_of({**header, **fields}) == "bad_field", fields


MESSAGE = [b"CS1", b"{}", b""]


@pytest.mark.parametrize(
    ("envelope", "message"),
    [
        ([], MESSAGE),
        ([b""], MESSAGE),
        ([b"\0abcd", b""], MESSAGE),
        ([b"1234", b""], MESSAGE),
        ([], [b"XX1", b""]),
        ([], [b"1234", b""]),
        ([], [b"12345", b"", *MESSAGE]),
        ([], []),
        ([], [b"CS1", b"", b"CS1"]),
    ],
)
def test_the_envelope_of_req_and_of_proxies_is_parted_from_the_message(
    envelope: list[bytes], message: list[bytes]
) -> None:
    assert split_envelope([*envelope, *message]) == (envelope, message)


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
