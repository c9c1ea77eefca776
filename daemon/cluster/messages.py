"""Frames between daemon, Ray driver and other PCs: JSON and bytes, nothing unpickled.

A frame is two lengths (4 bytes each, big-endian), a JSON object and a body of bytes.
"""

import hashlib
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from daemon.dispatch.orders import Answered, BatchOrder, BatchReport, Unanswered
from daemon.records import JournalKey
from experts.spec import ExpertSpec

_LENGTHS = struct.Struct(">II")
#: The limit of a body holds a batch of large images, that of a head the JSON about it.
_MAX_HEAD_BYTES, _MAX_BODY_BYTES = 16 << 20, 1 << 30


def send(line: socket.socket, head: dict[str, Any], body: Sequence[bytes] = ()) -> None:
    """Send a frame; one thread at a time. Raises OSError."""
    text = json.dumps(head).encode()
    line.sendall(b"".join((_LENGTHS.pack(len(text), sum(map(len, body))), text, *body)))


def receive(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Return the next frame, None at the end of the connection. Raises OSError, ConnectionError for a bad frame."""
    prefix = stream.read(_LENGTHS.size)
    if not prefix:
        return None
    if len(prefix) < _LENGTHS.size:
        raise ConnectionError("a frame is cut short")
    head_bytes, body_bytes = _LENGTHS.unpack(prefix)
    if head_bytes > _MAX_HEAD_BYTES or body_bytes > _MAX_BODY_BYTES:
        raise ConnectionError(f"a frame of {head_bytes} and {body_bytes} bytes is too long")
    text, body = stream.read(head_bytes), stream.read(body_bytes)
    if len(text) < head_bytes or len(body) < body_bytes:
        raise ConnectionError("a frame is cut short")
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("a frame is not JSON") from error
    if not isinstance(head, dict):
        raise ConnectionError("a frame is not a JSON object")
    return head, body


@cache
def code_version() -> str:
    """Return version and digest of this code: both sides need the same."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for folder in ("daemon", "experts", "routing_rules"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return f"{version('coserve')} ({digest.hexdigest()[:12]})"


# Values as JSON, and back

_SPEC, _ORDER = TypeAdapter(ExpertSpec), TypeAdapter(BatchOrder)


def plain_spec(spec: ExpertSpec) -> dict[str, Any]:
    return _SPEC.dump_python(spec, mode="json")


def spec_of(plain: dict[str, Any], folder: Path) -> ExpertSpec:
    return _cached_in(folder, _SPEC.validate_python(plain))


def _cached_in(folder: Path, spec: ExpertSpec) -> ExpertSpec:
    """Return an expert whose files lie in a worker's cache, by their digests."""
    backbone = spec.backbone and _cached_in(folder, spec.backbone)
    return replace(spec, file=folder / spec.sha256, backbone=backbone)


def packed_order(order: BatchOrder, chosen: Sequence[int], sizes: Sequence[int]) -> bytes:
    """Encode the images `chosen` of a batch as JSON; `sizes` are the lengths of their bytes, which follow it."""
    places = zip(chosen, accumulate(sizes, initial=0), sizes, strict=False)
    images = tuple(
        replace(order.images[number], key=JournalKey(order.batch_id, begin, size)) for number, begin, size in places
    )
    return _ORDER.dump_json(replace(order, images=images))


def order_of(body: bytes, order_bytes: int, folder: Path) -> tuple[BatchOrder, dict[JournalKey, bytes]]:
    order = _ORDER.validate_json(body[:order_bytes])
    # Each head once: a batch's images are judged together if their heads are one object.
    heads = {image.head: image.head and _cached_in(folder, image.head) for image in order.images}
    images = tuple(replace(image, head=heads[image.head]) for image in order.images)
    keys = [image.key for image in images]
    payloads = {key: body[order_bytes + key.offset : order_bytes + key.offset + key.length] for key in keys}
    return replace(order, spec=_cached_in(folder, order.spec), images=images), payloads


class Report(BaseModel):
    """The part of a `BatchReport` that a worker knows, checked because it comes from another PC."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)

    infer_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    memory_limit: Annotated[int, Field(ge=1)] | None
    device_error: str | None
    results: tuple[Unanswered | Answered, ...]


def plain_report(report: BatchReport) -> dict[str, Any]:
    return Report.model_validate(report).model_dump(mode="json")


def checked_report(plain: Any, experts: Sequence[ExpertSpec]) -> Report:
    """Decode a worker's report about images at `experts`; ValueError if it cannot be one."""
    report = Report.model_validate(plain)
    if len(report.results) != len(experts):
        raise ValueError(f"{len(report.results)} results for {len(experts)} images")
    answers = [each.answer if isinstance(each, Answered) else None for each in report.results]
    for answer, expert in zip(answers, experts, strict=True):
        labels = {answer.label, *(box.label for box in answer.detections)} if answer else set[str | None]()
        if unknown := labels - {*expert.classes, *([None] if expert.task == "detect" else [])}:
            raise ValueError(f"{expert.expert} has no label {', '.join(map(repr, unknown))}")
    if not all(answer.is_finite for answer in answers if answer):
        raise ValueError("a confidence or a box is not a finite number")
    return report
