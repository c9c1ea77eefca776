"""Frames between daemon, Ray driver and other PCs: JSON and bytes, nothing unpickled.

A frame is two lengths (4 bytes each, big-endian), a JSON object and a body of bytes.
"""

import hashlib
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field

from daemon.dispatch.orders import Answered, BatchOrder, BatchReport, Fault, ImageOrder, Unanswered
from daemon.policy.request import ExecutorId, RequestId
from daemon.records import JournalKey, Pixels
from experts.spec import Answer, Detection, ExpertSpec

_LENGTHS = struct.Struct(">II")
#: The limit of a body holds a batch of large images, that of a head the JSON about it.
_MAX_HEAD_BYTES, _MAX_BODY_BYTES = 16 << 20, 1 << 30
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Box = tuple[str, _Number, tuple[_Number, _Number, _Number, _Number]]
_SPEC_FIELDS = tuple(field.name for field in fields(ExpertSpec))


class Report(BaseModel):
    """A worker's report (`plain_report`), checked because it comes from another PC."""

    model_config = ConfigDict(extra="forbid")

    infer_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    memory_limit: Annotated[int, Field(ge=1)] | None
    device_error: str | None
    results: list[tuple[Fault, str] | tuple[str | None, _Number | None, list[_Box], tuple[int, int]]]


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


def plain_spec(spec: ExpertSpec) -> dict[str, Any]:
    plain = {name: getattr(spec, name) for name in _SPEC_FIELDS}
    return plain | {"file": str(spec.file), "backbone": spec.backbone and plain_spec(spec.backbone)}


def spec_of(plain: dict[str, Any], folder: Path) -> ExpertSpec:
    values = dict(plain)
    values |= {name: tuple(plain[name]) for name in ("classes", "mean", "std")}
    values |= {"file": folder / plain["sha256"], "backbone": plain["backbone"] and spec_of(plain["backbone"], folder)}
    return ExpertSpec(**values)


def packed_order(order: BatchOrder, chosen: Sequence[int], sizes: Sequence[int]) -> bytes:
    """Encode the images `chosen` of a batch as JSON; `sizes` are the lengths of their bytes, which follow it."""
    heads: dict[int, int] = {}
    specs: list[ExpertSpec] = []
    rows: list[Any] = []
    for number, size in zip(chosen, sizes, strict=True):
        image = order.images[number]
        if image.head is not None and heads.setdefault(id(image.head), len(specs)) == len(specs):
            specs.append(image.head)
        head = None if image.head is None else heads[id(image.head)]
        rows.append((image.request_id, image.pixels.encoding, image.pixels.shape, size, head))
    heads_of = [*map(plain_spec, specs)]
    plain = {"batch": order.batch_id, "spec": plain_spec(order.spec), "heads": heads_of, "images": rows}
    return json.dumps(plain).encode()


def order_of(body: bytes, order_bytes: int, folder: Path) -> tuple[BatchOrder, dict[JournalKey, bytes]]:
    plain = json.loads(body[:order_bytes])
    heads = [spec_of(spec, folder) for spec in plain["heads"]]
    payloads: dict[JournalKey, bytes] = {}
    images: list[ImageOrder] = []
    begin = order_bytes
    for request_id, encoding, shape, size, head in plain["images"]:
        key = JournalKey(plain["batch"], begin, size)
        payloads[key] = body[begin : begin + size]
        begin += size
        pixels = Pixels(encoding, shape and tuple(shape))
        images.append(ImageOrder(RequestId(request_id), key, pixels, None if head is None else heads[head]))
    return BatchOrder(plain["batch"], spec_of(plain["spec"], folder), tuple(images)), payloads


def plain_report(report: BatchReport) -> dict[str, Any]:
    names = ("infer_ms", "memory_limit", "device_error")
    return {name: getattr(report, name) for name in names} | {"results": [*map(_plain_result, report.results)]}


def checked_report(plain: Any, experts: Sequence[ExpertSpec]) -> Report:
    """Decode a worker's report about images at `experts`; ValueError if it cannot be one."""
    report = Report.model_validate(plain)
    if len(report.results) != len(experts):
        raise ValueError(f"{len(report.results)} results for {len(experts)} images")
    for result, expert in zip(report.results, experts, strict=True):
        labels = {result[0], *(box[0] for box in result[2])} if len(result) > 2 else set[str]()
        if unknown := labels - {*expert.classes, *([None] if expert.task == "detect" else [])}:
            raise ValueError(f"{expert.expert} has no label {', '.join(map(repr, unknown))}")
    return report


def report_of(
    report: Report,
    results: Sequence[Answered | Unanswered],
    executor: ExecutorId,
    batch_id: int,
    times_s: tuple[float, float],
) -> BatchReport:
    outcome = report.infer_ms, report.memory_limit, report.device_error
    return BatchReport(executor, batch_id, tuple(results), *times_s, *outcome)


def _plain_result(result: Answered | Unanswered) -> tuple[Any, ...]:
    if isinstance(result, Unanswered):
        return result.fault, result.detail
    answer = result.answer
    boxes = [(box.label, box.confidence, box.box) for box in answer.detections]
    return answer.label, answer.confidence, boxes, result.image_size


def result_of(plain: Sequence[Any]) -> Answered | Unanswered:
    if len(plain) == 2:
        return Unanswered(*plain)
    label, confidence, boxes, (width, height) = plain
    detections = tuple(Detection(name, share, tuple(box)) for name, share, box in boxes)
    return Answered(Answer(label, confidence, detections), (width, height))
