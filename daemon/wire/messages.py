"""Messages of the wire, version 1 (PROTOCOL.md): frames to checked messages, and answers to frames.

Checks here concern the message alone; intake makes those that need the rules, the database or the image's bytes. Code
that clients and the daemon share is in coserve_client/frames.py.
"""

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Literal, TypeVar

from coserve_client.frames import KEY, MAGIC, MAX_HEADER_BYTES, encode
from daemon.records import (
    MAX_ATTRIBUTES,
    MAX_ATTRIBUTES_BYTES,
    BoardRef,
    Generation,
    Image,
    Pixels,
    attributes_fit,
    attributes_text,
)
from routing_rules.document import hidden
from routing_rules.schema import MAX_NAME

__all__ = [
    "KEY", "MAGIC", "MAX_HEADER_BYTES", "MAX_INTEGER", "Code", "MessageError", "encode", "read_header",
    "split_envelope",
]  # fmt: skip

MAX_INTEGER = 2**63 - 1

#: The longest chain of routing frames that a proxy may put before a message; beyond it the frames are the message.
_MAX_ENVELOPE_FRAMES = 8

Code = Literal[
    "bad_frames",
    "unsupported_version",
    "bad_header",
    "bad_field",
    "unknown_board",
    "unknown_component",
    "unknown_model",
    "bad_image",
    "too_large",
    "attempt_closed",
]


class MessageError(Exception):
    """A message that will never be accepted. `image_id` and `source` are as sent, None if not legal strings."""

    def __init__(self, code: Code, reason: str, image_id: str | None = None, source: str | None = None) -> None:
        super().__init__(f"{code}: {reason}")
        self.code: Code = code
        self.reason = reason
        self.image_id = image_id
        self.source = source


def split_envelope(frames: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Split off routing frames (a REQ's delimiter, its request number, a proxy's ids) for the answer."""
    for at, frame in enumerate(frames[: _MAX_ENVELOPE_FRAMES + 1]):
        if not frame:
            is_whole = at == 0 or (at + 1 < len(frames) and frames[at + 1].startswith(b"CS"))
            return (list(frames[: at + 1]), list(frames[at + 1 :])) if is_whole else ([], list(frames))
        if frame.startswith(b"CS") or not (len(frame) == 4 or (len(frame) == 5 and frame[0] == 0)):
            break  # neither a request's number (4 bytes) nor an identity that ROUTER made up (0 and 4 bytes)
    return [], list(frames)


def read_header(frames: Sequence[bytes]) -> dict[str, Any]:
    """Return the fields of a valid header, without those that are null (null means absent)."""
    flaw = _flaw_of_frames(frames)
    if flaw is None:
        return _parse_header(frames[1])
    image_id = source = None
    if len(frames) > 1 and frames[1]:
        try:
            image_id, source = _keys_sent(_parse_header(frames[1]))
        except MessageError as error:
            image_id, source = error.image_id, error.source
    raise MessageError(*flaw, image_id, source)


def _flaw_of_frames(frames: Sequence[bytes]) -> tuple[Code, str] | None:
    magic = frames[0] if frames else b""
    if magic != MAGIC and magic.startswith(b"CS") and magic[2:].isdigit():
        return "unsupported_version", "this daemon speaks version 1: the first frame is CS1"
    if magic != MAGIC:
        return "bad_frames", "the first frame is not CS1"
    if len(frames) not in (2, 3):
        return "bad_frames", f"expected CS1, a header and at most one payload, got {len(frames)} frames"
    if not frames[1]:
        return "bad_frames", "the header frame is empty"
    return None


class _Scan:
    """Hooks of one JSON parse: they note values that the protocol forbids and the standard library accepts."""

    def __init__(self) -> None:
        self.flaw: str | None = None

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) == len(pairs):
            return fields
        self.flaw = "a key appears twice"
        keys: set[str] = set()
        for key, _ in pairs:
            if key in keys:
                fields.pop(key, None)  # which of the two was meant is anyone's guess
            keys.add(key)
        return fields

    def constant(self, text: str) -> None:
        self.flaw = f"{text} is not JSON"

    def real(self, text: str) -> float:
        value = float(text)
        if math.isinf(value):
            self.flaw = "a number is infinite"
        return value

    @staticmethod
    def integer(text: str) -> int:
        """Parse an integer of any length, without int()'s limit on digits: a longer one is out of range anyway."""
        if len(text) <= 20:
            return int(text)
        return -MAX_INTEGER - 1 if text.startswith("-") else MAX_INTEGER + 1


def _parse_header(header: bytes) -> dict[str, Any]:
    if len(header) > MAX_HEADER_BYTES:
        raise MessageError("bad_header", f"the header has {len(header)} bytes, at most {MAX_HEADER_BYTES} are read")
    scan = _Scan()
    try:
        text = header.decode("utf-8")
        if text.startswith("\ufeff"):
            text = text[1:]
            scan.flaw = "the header begins with a byte-order mark"
        parsed = json.loads(
            text,
            object_pairs_hook=scan.pairs,
            parse_constant=scan.constant,
            parse_float=scan.real,
            parse_int=scan.integer,
        )
    except UnicodeDecodeError as error:
        raise MessageError("bad_header", f"the header is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise MessageError("bad_header", f"the header is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise MessageError("bad_header", "the header is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise MessageError("bad_header", "the header is not a JSON object")
    if scan.flaw:
        raise MessageError("bad_header", scan.flaw, *_keys_sent(parsed))
    return {name: value for name, value in parsed.items() if value is not None}


def _keys_sent(fields: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return `id` and `source` as an answer repeats them: None if missing or not a legal key."""
    return _legal_key(fields.get("id")), _legal_key(fields.get("source"))


def _legal_key(value: object) -> str | None:
    return value if isinstance(value, str) and KEY.fullmatch(value) else None


T = TypeVar("T")

VERSION = 1
DAY_MS = 86_400_000

#: Texts of people: who decided, and notes. Names on the wire follow a stricter rule (`name_in_use`).
NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,128}")
NAME_EXPECTED = f"a string of 1 to {MAX_NAME} characters without control or invisible characters"
_MAX_ATTRIBUTE = 256
_ATTRIBUTE_EXPECTED = "a string of at most 256 characters without control or invisible characters"
#: Spaces of all scripts, tabs and line ends: a serial has none at its ends. Other control characters are mistakes.
_WHITE_SPACE = "\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_TEXT = re.compile(r"[^\ud800-\udfff]*")
_TEXT_EXPECTED = "a string without surrogates"
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_KEY_EXPECTED = "a string of 1 to 128 of A-Z a-z 0-9 . _ : / -"
_RFC3339 = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,60}))?"
    r"(?:([Zz])|([+-])([0-9]{2}):([0-9]{2}))"
)
_RFC3339_EXPECTED = "an RFC 3339 time such as 2026-11-21T09:28:11.123Z"


@dataclass(frozen=True, slots=True)
class Hello:
    """A publisher asks for its credit and the limits. Its `id` and `source`, if any, are only sent back."""

    image_id: str | None
    source: str | None


@dataclass(frozen=True, slots=True)
class ResultsSince:
    """A consumer asks for the results with a `seq` greater than `seq`, at most `limit` of them."""

    image_id: str | None
    source: str | None
    seq: int
    limit: int


Message = Image | Generation | Hello | ResultsSince


def text_in_use(text: str) -> str | None:
    """Return a text as it is used, published and stored, in NFC; None if it has control or invisible characters."""
    if text.isascii():
        return text if text.isprintable() else None
    return None if hidden(text) else unicodedata.normalize("NFC", text)


def name_in_use(value: object) -> str | None:
    """Return a serial or name as it is used, on the wire, in files and in camera tools; None if it cannot be one."""
    name = text_in_use(value) if isinstance(value, str) else None
    return name if name is not None and 1 <= len(name) <= MAX_NAME else None


# --- fields ------------------------------------------------------------------------------------------------------


class _FieldError(Exception):
    def __init__(self, path: str, expected: str, value: object) -> None:
        super().__init__(f"{path}: is missing" if value is None else f"{path}: expected {expected}, got {shown(value)}")


def shown(value: object) -> str:
    """Return a value as an error names it: short, and in ASCII."""
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 40 else value[:40] + "…")
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else json.dumps(value)


class _Fields:
    """Typed access to one JSON object. Each method returns the field's value, or None if it is absent."""

    def __init__(self, fields: Mapping[str, Any], path: str = "") -> None:
        self._fields = fields
        self._path = path

    def string(self, name: str, pattern: re.Pattern[str], expected: str) -> str | None:
        value = self._fields.get(name)
        if value is None or (isinstance(value, str) and pattern.fullmatch(value)):
            return value
        raise self._wrong(name, expected, value)

    def needed(self, name: str, value: T | None, expected: str) -> T:
        if value is None:
            raise self._wrong(name, expected, None)
        return value

    def keys_sent(self) -> tuple[str | None, str | None]:
        return _keys_sent(self._fields)

    def key(self, name: str) -> str:
        return self.needed(name, self.string(name, KEY, _KEY_EXPECTED), _KEY_EXPECTED)

    def name(self, name: str) -> str:
        return self.needed(name, self.name_or_none(name), NAME_EXPECTED)

    def name_or_none(self, name: str) -> str | None:
        value = self._fields.get(name)
        used = name_in_use(value)
        if used is None and value is not None:
            raise self._wrong(name, NAME_EXPECTED, value)
        return used

    def integer(self, name: str, least: int, most: int = MAX_INTEGER) -> int | None:
        value = self._fields.get(name)
        if value is None or (type(value) is int and least <= value <= most):
            return value
        most_text = "" if most == MAX_INTEGER else f" to {most}"
        raise self._wrong(name, f"an integer from {least}{most_text}", value)

    def one_of(self, name: str, *choices: str) -> str | None:
        value = self._fields.get(name)
        if value is None or (isinstance(value, str) and value in choices):
            return value
        raise self._wrong(name, " or ".join(choices), value)

    def flag(self, name: str) -> bool | None:
        value = self._fields.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(name, "true or false", value)

    def inner(self, name: str) -> "_Fields | None":
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return _Fields(value, f"{name}.")

    def serial(self) -> str:
        """Return `serial` without white space at its ends: a scanner's line end is no part of it."""
        value = self._fields.get("serial")
        if isinstance(value, str) and (serial := name_in_use(value.strip(_WHITE_SPACE))) is not None:
            return serial
        raise self._wrong("serial", NAME_EXPECTED, value)

    def attributes(self) -> tuple[tuple[str, str], ...]:
        value = self._fields.get("attributes")
        if value is None:
            return ()
        if not isinstance(value, dict):
            raise self._wrong("attributes", f"an object of at most {MAX_ATTRIBUTES} texts", value)
        texts: dict[str, str] = {}
        for name, text in value.items():
            if text is None:
                continue
            if (used_name := name_in_use(name)) is None:
                raise _FieldError(f"{self._path}attributes", f"names that are {NAME_EXPECTED}", name)
            used = text_in_use(text) if isinstance(text, str) else None
            if used is None or len(used) > _MAX_ATTRIBUTE:
                raise _FieldError(f"{self._path}attributes.{shown(name)}", _ATTRIBUTE_EXPECTED, text)
            texts[used_name] = used
        if not attributes_fit(texts):
            size = f"{len(texts)} with {len(attributes_text(texts).encode())} bytes"
            most = f"at most {MAX_ATTRIBUTES} texts and {MAX_ATTRIBUTES_BYTES} bytes of JSON"
            raise _FieldError(f"{self._path}attributes", most, size)
        return tuple(sorted(texts.items()))

    def time(self, name: str) -> str | None:
        """Return an RFC 3339 time as UTC text with milliseconds, as the database stores it."""
        value = self._fields.get(name)
        if value is None:
            return None
        text = _utc_of_rfc3339(value) if isinstance(value, str) else None
        if text is None:
            raise self._wrong(name, _RFC3339_EXPECTED, value)
        return text

    def shape(self, name: str) -> tuple[int, int, int] | None:
        """Return (height, width, channels); the payload's scan refuses a height or width of 0."""
        value = self._fields.get(name)
        if value is None:
            return None
        if isinstance(value, list) and len(value) == 3 and all(type(n) is int and 0 <= n <= MAX_INTEGER for n in value):
            height, width, channels = value
            if channels in (1, 3):
                return height, width, channels
        raise self._wrong(name, "[height, width, channels] with 1 or 3 channels", value)

    def _wrong(self, name: str, expected: str, value: object) -> _FieldError:
        return _FieldError(self._path + name, expected, value)


def parse(frames: Sequence[bytes]) -> tuple[Message, bytes | None]:
    """Check frames without envelope; return message and payload. MessageError if it will never be accepted."""
    header = read_header(frames)
    fields = _Fields(header)
    try:
        kind = fields.needed("type", fields.one_of("type", *_KINDS), " or ".join(_KINDS))
        message = _KINDS[kind](fields)
    except _FieldError as error:
        raise MessageError("bad_field", str(error), *_keys_sent(header)) from None
    return message, frames[2] if len(frames) == 3 else None


def _inspect(fields: _Fields) -> Image:
    image_id = fields.key("id")
    return Image(
        image_id=image_id,
        source=fields.key("source"),
        board=_board(fields),
        component=fields.name("component"),
        designator=fields.name_or_none("designator") or image_id,
        captured_at=fields.time("captured_at"),
        deadline_ms=fields.integer("deadline_ms", 1, DAY_MS),
        sha256=_sha256(fields),
        pixels=_pixels(fields),
    )


def _board(fields: _Fields) -> BoardRef:
    board = fields.needed("board", fields.inner("board"), "an object")
    return BoardRef(
        type=board.name("type"),
        serial=board.serial(),
        lot=board.name_or_none("lot"),
        station=board.name_or_none("station"),
        attempt=board.integer("attempt", 1),
        attributes=board.attributes(),
    )


def _sha256(fields: _Fields) -> str:
    return (fields.string("sha256", _SHA256, "64 hex digits") or "").lower()


_ENCODED = Pixels()


def _pixels(fields: _Fields) -> Pixels:
    encoding = fields.one_of("encoding", "image", "raw")
    shape = fields.shape("shape")
    dtype = fields.one_of("dtype", "uint8")
    if encoding != "raw":
        return _ENCODED
    shape = fields.needed("shape", shape, "[height, width, channels]")
    fields.needed("dtype", dtype, "uint8")
    return Pixels("raw", shape)


def _generate(fields: _Fields) -> Generation:
    return Generation(
        request_id=fields.key("id"),
        source=fields.key("source"),
        model=fields.name("model"),
        prompt=fields.needed("prompt", fields.string("prompt", _TEXT, _TEXT_EXPECTED), _TEXT_EXPECTED),
        max_new_tokens=fields.integer("max_new_tokens", 1),
        task=fields.name_or_none("task"),
        slo_ms=fields.integer("slo_ms", 1),
        board=None if fields.inner("board") is None else _board(fields),
        stream=fields.flag("stream") or False,
        deadline_ms=fields.integer("deadline_ms", 1, DAY_MS),
    )


def _hello(fields: _Fields) -> Hello:
    return Hello(*fields.keys_sent())


def _results_since(fields: _Fields) -> ResultsSince:
    seq = fields.needed("seq", fields.integer("seq", 0), "an integer from 0")
    limit = fields.integer("limit", 1, 1000)
    return ResultsSince(*fields.keys_sent(), seq, 100 if limit is None else limit)


_KINDS = {"inspect": _inspect, "generate": _generate, "hello": _hello, "results_since": _results_since}


def _utc_of_rfc3339(text: str) -> str | None:
    """Return UTC with milliseconds (truncated), None for an invalid time of RFC 3339."""
    match = _RFC3339.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(match[n]) for n in range(1, 7))
    offset_minutes = 0
    if match[9]:
        offset_hours, offset_rest = int(match[10]), int(match[11])
        if offset_hours > 23 or offset_rest > 59:
            return None
        offset_minutes = (offset_hours * 60 + offset_rest) * (-1 if match[9] == "-" else 1)
    leap = second == 60 and (hour * 60 + minute - offset_minutes) % 1440 == 1439
    try:
        moment = datetime(
            year, month, day, hour, minute, 59 if leap else second, tzinfo=timezone(timedelta(minutes=offset_minutes))
        ).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    millis = "999" if leap else ((match[7] or "") + "000")[:3]
    return f"{moment.isoformat()[:19]}.{millis}Z"


# --- answers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    kind: str
    header: bytes
    code: str | None = None
    source: str | None = None
    reason: str = ""


def answer(kind: str, image_id: str | None, source: str | None, credit: int, **fields: Any) -> Answer:
    """Return the answer to a message; `credit` is the number of messages that may be outstanding from now on."""
    header = encode({"type": kind, "id": image_id, "source": source, "credit": credit, **fields})
    return Answer(kind, header, fields.get("code"), source, fields.get("reason", ""))


def results_answer(asked: ResultsSince, page: Mapping[str, Any], credit: int) -> Answer:
    """Return the first items of `page` that fit one header; an item that is too long goes alone."""
    room = MAX_HEADER_BYTES - 1024  # for what stands around the items
    items: list[Any] = page["items"]
    count = 0
    for item in items:
        room -= len(encode(item)) + 1
        if room < 0 and count:
            break
        count += 1
    body = {**page, "items": items[:count]}
    if count < len(items):
        body |= {"last_seq": items[count - 1]["seq"], "more": True}
    return answer("results", asked.image_id, asked.source, credit, **{k: v for k, v in body.items() if k != "type"})
