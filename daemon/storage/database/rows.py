"""Records into rows, and rows into the messages of the results stream (PROTOCOL.md, Results stream).

Writer and reader render the same rows here, so that a consumer that catches up gets what a live one got.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any
from urllib.parse import quote

from daemon.records import BoardRef, ExpertSwitch, Generation, Image, JournalKey, Message, Pixels, Verdict
from daemon.units import utc_text
from experts.editions.edition import Edition

Row = dict[str, Any]
#: A row as it was made here, or as the database gave it.
AnyRow = Mapping[Any, Any]
#: Columns of `stages` that are stored as they are, and those that are rounded.
_STAGE = ("expert", "expert_version", "expert_settings", "label", "device", "executor", "batch_id", "batch_size")
_TIMES = ("queued_ms", "load_ms", "infer_ms")
_AS_SENT = ("source", "image_id", "component", "designator", "captured_at", "deadline_ms")
_sent_of, _stage_of, _times_of = attrgetter(*_AS_SENT), attrgetter(*_STAGE), attrgetter(*_TIMES)


@dataclass(frozen=True, slots=True)
class ImageCopy:
    """A durable copy; `image_path` is None if the journal could not give the bytes back."""

    inspection_id: int
    image_path: str | None


#: Written by one transaction, and tried again together.
Result = Verdict | Generation | ExpertSwitch | ImageCopy


@dataclass(slots=True)
class WrittenResults:
    """The effects of one transaction: messages by `seq`, (source, bytes) of what finished, copies to make."""

    published: list[Message] = field(default_factory=list[Message])
    done: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    done_texts: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    #: Images that stay, and when they got their verdict.
    to_copy: list[tuple[Image, str]] = field(default_factory=list[tuple[Image, str]])
    freed_journal: bool = False


@dataclass(frozen=True, slots=True)
class Recovery:
    """The state that a restart resumes; `editions` are those of pending images and open attempts that did not end."""

    pending: list[Image]
    editions: dict[int, str]
    last_seq: int
    last_batch_id: int


def sent_row(image: Image) -> Row:
    """Return the columns of an image that say which one it is and what was sent with it."""
    sent = dict(zip(_AS_SENT, _sent_of(image), strict=True))
    return sent | {"inspection_id": image.inspection_id, "lot": image.board.lot, "station": image.board.station}


def inspection_row(image: Image, rules_version: str, at: str) -> Row:
    """Return the row of an accepted image; the columns of its verdict stay null."""
    return {
        **sent_row(image),
        "board_id": image.board_id,
        "rules_version": rules_version,
        "edition": image.edition,
        "accepted_at": at,
        "image_bytes": image.key.length,
        "status": "accepted",
        "late": int(image.late),
        "surplus": 1 if image.repeats else None,
        "reason": image.guard,
        "image_sha256": image.sha256,
    }


def edition_row(edition: Edition) -> Row:
    names = ("parent", "who", "why", "rules_version", "sha256", "note")
    row: Row = {name: getattr(edition, name) for name in names}
    return row | {"edition": edition.number, "created_at": utc_text(edition.created_at.timestamp()), "ended_at": None}


def pending_row(image: Image) -> Row:
    height, width, channels = image.pixels.shape or (None, None, None)
    return {
        "inspection_id": image.inspection_id,
        "task": "judge",
        "segment": image.key.segment,
        "offset": image.key.offset,
        "length": image.key.length,
        "encoding": image.pixels.encoding,
        "height": height,
        "width": width,
        "channels": channels,
    }


def pending_image(row: AnyRow, accepted_s: float) -> Image:
    """Return the image of a row of `pending_images`, as a restart finds it."""
    same = (*_AS_SENT, "inspection_id", "board_id", "attempt", "edition")
    return Image(
        **{name: row[name] for name in same},
        board=BoardRef(row["board_type"], row["serial"], row["lot"], row["station"]),
        sha256=row["image_sha256"],
        late=bool(row["late"]),
        repeats=bool(row["late"] and row["surplus"]),
        guard=row["reason"],
        key=JournalKey(row["segment"], row["offset"], row["length"]),
        pixels=Pixels()
        if row["encoding"] == "image"
        else Pixels("raw", (row["height"], row["width"], row["channels"])),
        accepted_s=accepted_s,
    )


def stage_rows(verdict: Verdict) -> list[Row]:
    return [
        {
            "inspection_id": verdict.image.inspection_id,
            "step": step,
            **dict(zip(_STAGE, _stage_of(stage), strict=True)),
            "confidence": finite(stage.confidence),
            **dict(zip(_TIMES, map(rounded, _times_of(stage)), strict=True)),
        }
        for step, stage in enumerate(verdict.stages)
    ]


def detection_rows(verdict: Verdict) -> list[Row]:
    return [
        {
            "inspection_id": verdict.image.inspection_id,
            "step": step,
            "label": detection.label,
            "confidence": float(detection.confidence),
            **{name: float(value) for name, value in zip(("x1", "y1", "x2", "y2"), detection.box, strict=True)},
        }
        for step, stage in enumerate(verdict.stages)
        for detection in stage.detections
    ]


def switch_row(switch: ExpertSwitch) -> Row:
    row = asdict(switch)
    at = utc_text(row.pop("at_wall_s"))
    return row | {"at": at, "evicted": json.dumps(switch.evicted), "load_ms": rounded(switch.load_ms)}


@lru_cache(maxsize=1024)  # a board's images have the same
def topic(kind: str, *parts: str) -> str:
    """Return `inspection/<board type>/<serial>/`, percent-encoded outside `[A-Za-z0-9._:-]`."""
    # quote() never encodes the tilde.
    encoded = (quote(part, safe="._:-").replace("~", "%7E") for part in parts)
    return "/".join((kind, *encoded, ""))


def inspection_message(row: AnyRow, stages: Sequence[AnyRow], detections: Sequence[AnyRow]) -> Message:
    """Render a row of `inspections` that has the board's `board_type`, `serial` and `attempt` too."""
    body = {
        "seq": row["seq"],
        "at": row["completed_at"],
        "inspection_id": row["inspection_id"],
        "id": row["image_id"],
        "source": row["source"],
        "board": board_of(row),
        **{name: row[name] for name in ("component", "designator", "verdict", "defect", "reason")},
        "late": bool(row["late"]),
        "stages": [_stage(stage, [box for box in detections if box["step"] == stage["step"]]) for stage in stages],
        "latency_ms": row["latency_ms"],
        "rules_version": row["rules_version"],
        "edition": row["edition"],
    }
    return Message(row["seq"], topic("inspection", row["board_type"], row["serial"]), body)


def board_message(row: AnyRow) -> Message:
    body = {
        "seq": row["seq"],
        "at": row["completed_at"],
        "board": board_of(row),
        **{name: row[name] for name in ("verdict", "expected", "inspected")},
        **{name: json.loads(row[name] or "[]") for name in ("failed", "review", "unknown", "missing")},
        **{name: row[name] for name in ("reason", "rules_version", "edition")},
    }
    return Message(row["seq"], topic("board", row["board_type"], row["serial"]), body)


def review_message(row: AnyRow) -> Message:
    """Render a row of `reviews` that has the columns of its board, and `component` and `designator` of its image."""
    names = ("component", "designator", "verdict", "defect", "reviewer", "note", "undo_of", "board_verdict", "epoch")
    body: Row = {name: row[name] for name in ("seq", "at", "review_id", "inspection_id")}
    body |= {"board": board_of(row), **{name: row[name] for name in names}}
    return Message(row["seq"], topic("review", row["board_type"], row["serial"]), body)


def generation_message(row: AnyRow) -> Message:
    same = ("source", "model", "mode", "task", "text", "prompt_tokens", "new_tokens", "ttft_ms", "tpot_ms", "total_ms")
    body: Row = {"seq": row["seq"], "at": row["completed_at"], "id": row["request_id"]}
    body |= {name: row[name] for name in (*same, "status", "reason")}
    return Message(row["seq"], topic("generation", row["source"]), body)


def finite(value: float | None) -> float | None:
    """Return None for NaN and infinity: JSON has neither, and SQLite would store NaN as null."""
    return float(value) if value is not None and math.isfinite(value) else None


def rounded(value: float | None, digits: int = 3) -> float | None:
    """Round before it is stored, so that the stored value is the published one."""
    return None if (number := finite(value)) is None else round(number, digits)


def board_of(row: AnyRow) -> Row:
    sent = {"type": row["board_type"], "serial": row["serial"]}
    sent |= {name: row[name] for name in ("lot", "station") if row[name] is not None}
    return sent | {"attempt": row["attempt"]}


def _stage(row: AnyRow, boxes: Sequence[AnyRow]) -> Row:
    return {
        "expert": row["expert"],
        "version": row["expert_version"],
        "settings": row["expert_settings"],
        "label": row["label"],
        "confidence": row["confidence"],
        "detections": [
            {name: box[name] for name in ("label", "confidence")}
            | {"box": [box[edge] for edge in ("x1", "y1", "x2", "y2")]}
            for box in boxes
        ],
        "device": row["device"],
        "batch": row["batch_size"],
        **{name: row[name] for name in _TIMES},
    }
