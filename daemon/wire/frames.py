"""The outside of every message (PROTOCOL.md, Frames) as the daemon reads it: envelope, magic, a strict JSON header.

Intake and control read their messages through here; the meaning of the fields is theirs. What a client and the daemon
share, `encode` among it, is in coserve_client/frames.py and handed on from here.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from coserve_client.frames import KEY, MAGIC, MAX_HEADER_BYTES, encode

__all__ = [
    "KEY", "MAGIC", "MAX_HEADER_BYTES", "MAX_INTEGER", "Code", "Header", "MessageError", "encode", "read_header",
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
]


class MessageError(Exception):
    """A message that will never be accepted. `image_id` and `source` are as sent, None where not legal strings."""

    def __init__(self, code: Code, reason: str, image_id: str | None = None, source: str | None = None) -> None:
        super().__init__(f"{code}: {reason}")
        self.code: Code = code
        self.reason = reason
        self.image_id = image_id
        self.source = source


@dataclass(frozen=True, slots=True)
class Header:
    """One JSON object that may be read: `fields` without those that are null (null means absent)."""

    fields: dict[str, Any]
    image_id: str | None
    source: str | None


def split_envelope(frames: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Part what routing put before a message (a REQ's delimiter, its request number, a proxy's ids) from its frames.

    The answer goes back behind the same envelope.
    """
    for at, frame in enumerate(frames[: _MAX_ENVELOPE_FRAMES + 1]):
        if not frame:
            is_whole = at == 0 or (at + 1 < len(frames) and frames[at + 1].startswith(b"CS"))
            return (list(frames[: at + 1]), list(frames[at + 1 :])) if is_whole else ([], list(frames))
        if frame.startswith(b"CS") or not (len(frame) == 4 or (len(frame) == 5 and frame[0] == 0)):
            break  # neither a request's number (4 bytes) nor an identity that ROUTER made up (0 and 4 bytes)
    return [], list(frames)


def read_header(frames: Sequence[bytes]) -> Header:
    """Check the frames and parse the header; MessageError with bad_frames, unsupported_version or bad_header."""
    flaw = _flaw_of_frames(frames)
    if flaw is None:
        return _parse_header(frames[1])
    image_id = source = None
    if len(frames) > 1 and frames[1]:
        try:
            header = _parse_header(frames[1])
            image_id, source = header.image_id, header.source
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
    """Hooks of one JSON parse that note what the protocol forbids and the standard library lets pass."""

    def __init__(self) -> None:
        self.flaw: str | None = None

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) == len(pairs):
            return fields
        self.flaw = "a key appears twice"
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                fields.pop(key, None)  # which of the two was meant is anyone's guess
            seen.add(key)
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
        """Integers of any length, without int()'s limit on digits: what is too long is out of range either way."""
        if len(text) <= 20:
            return int(text)
        return -MAX_INTEGER - 1 if text.startswith("-") else MAX_INTEGER + 1


def _parse_header(header: bytes) -> Header:
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
    image_id, source = _legal_key(parsed.get("id")), _legal_key(parsed.get("source"))
    if scan.flaw:
        raise MessageError("bad_header", scan.flaw, image_id, source)
    return Header({name: value for name, value in parsed.items() if value is not None}, image_id, source)


def _legal_key(value: object) -> str | None:
    return value if isinstance(value, str) and KEY.fullmatch(value) else None
