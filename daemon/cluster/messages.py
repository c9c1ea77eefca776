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
from typing import Annotated, Any, BinaryIO, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from daemon.dispatch.pool import Batch, Fault, is_finite
from daemon.policy.request import ExecutorId
from daemon.records import JournalKey, Pixels
from experts.spec import Answer, ExpertSpec

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


class SentImage(NamedTuple):
    """An image of a batch: the place of its bytes behind the batch, and its head on the batch's backbone."""

    key: JournalKey
    pixels: Pixels
    head: ExpertSpec | None = None


_SPEC = TypeAdapter(ExpertSpec)
#: Its number, its expert and its images.
_BATCH = TypeAdapter(tuple[int, ExpertSpec, list[SentImage]])


def plain_spec(spec: ExpertSpec) -> dict[str, Any]:
    return _SPEC.dump_python(spec, mode="json")


def spec_of(plain: dict[str, Any], folder: Path) -> ExpertSpec:
    return _cached_in(folder, _SPEC.validate_python(plain))


def _cached_in(folder: Path, spec: ExpertSpec) -> ExpertSpec:
    backbone = spec.backbone and _cached_in(folder, spec.backbone)
    return replace(spec, file=folder / spec.sha256, backbone=backbone)


def packed_batch(batch: Batch, chosen: Sequence[int], sizes: Sequence[int]) -> bytes:
    """Encode the images `chosen` of a batch as JSON; `sizes` are the lengths of their bytes, which follow it."""
    keys = (JournalKey(batch.number, *place) for place in zip(accumulate(sizes, initial=0), sizes, strict=False))
    images = [
        SentImage(key, batch.images[number].pixels, batch.heads[number])
        for number, key in zip(chosen, keys, strict=True)
    ]
    return _BATCH.dump_json((batch.number, batch.spec, images))


def batch_of(
    body: bytes, batch_bytes: int, executor: ExecutorId, folder: Path
) -> tuple[Batch, dict[JournalKey, bytes]]:
    number, spec, images = _BATCH.validate_json(body[:batch_bytes])
    # Each head once: a batch's images are judged together if their heads are one object.
    heads = {image.head: image.head and _cached_in(folder, image.head) for image in images}
    batch = Batch(number, executor, _cached_in(folder, spec), images, [heads[image.head] for image in images])
    places = [(image.key, batch_bytes + image.key.offset) for image in images]
    return batch, {key: body[begin : begin + key.length] for key, begin in places}


class Report(BaseModel):
    """The part of an ended `Batch` that a worker knows, checked because it comes from another PC."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)

    infer_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    memory_limit: Annotated[int, Field(ge=1)] | None
    device_error: str | None
    answers: tuple[Fault | Answer, ...]
    sizes: tuple[tuple[int, int], ...]


def plain_report(batch: Batch) -> dict[str, Any]:
    return Report.model_validate(batch).model_dump(mode="json")


def checked_report(plain: Any, experts: Sequence[ExpertSpec]) -> Report:
    """Decode a worker's report about images at `experts`; ValueError if it cannot be one."""
    report = Report.model_validate(plain)
    if not len(report.answers) == len(report.sizes) == len(experts):
        raise ValueError(f"{len(report.answers)} answers for {len(experts)} images")
    for answer, expert in zip(report.answers, experts, strict=True):
        if isinstance(answer, Fault):
            continue
        labels = {answer.label, *(box.label for box in answer.detections)}
        if unknown := labels - {*expert.classes, *([None] if expert.task == "detect" else [])}:
            raise ValueError(f"{expert.expert} has no label {', '.join(map(repr, unknown))}")
        if not is_finite(answer):
            raise ValueError("a confidence or a box is not a finite number")
    return report
