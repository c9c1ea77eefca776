"""Records into rows: what an arrival, an outcome or a switch looks like in the tables."""

import json
import math
from typing import Any

from daemon.records import Accepted, Arrival, ExpertSwitch, ExpertVersion, JournalKey, Outcome, Pixels
from daemon.units import utc_text, wall_seconds

Row = dict[str, Any]


def inspection_row(arrival: Arrival, inspection_id: int, board: Row, *, late: bool, at: str) -> Row:
    """An accepted image; what its verdict will say is null."""
    return {
        "inspection_id": inspection_id,
        "source": arrival.source,
        "image_id": arrival.image_id,
        "board_id": board["board_id"],
        "component": arrival.component,
        "designator": arrival.designator,
        "captured_at": arrival.captured_at,
        "accepted_at": at,
        "deadline_ms": arrival.deadline_ms,
        "image_bytes": len(arrival.payload),
        "status": "accepted",
        "late": int(late),
        "rules_version": board["rules_version"],
        "image_sha256": arrival.payload_sha256,
        "lot": arrival.board.lot,
        "station": arrival.board.station,
    }


def pending_row(inspection_id: int, key: JournalKey, pixels: Pixels) -> Row:
    height, width, channels = pixels.shape or (None, None, None)
    return {
        "inspection_id": inspection_id,
        "task": "judge",
        "segment": key.segment,
        "offset": key.offset,
        "length": key.length,
        "encoding": pixels.encoding,
        "height": height,
        "width": width,
        "channels": channels,
    }


def accepted(row: Row, waiting: Row, board_type: str) -> Accepted:
    """The image as the drive takes it, live and after a restart."""
    return Accepted(
        inspection_id=row["inspection_id"],
        source=row["source"],
        image_id=row["image_id"],
        board_type=board_type,
        component=row["component"],
        accepted_wall_s=wall_seconds(row["accepted_at"]),
        deadline_ms=row["deadline_ms"],
        rules_version=row["rules_version"],
        key=journal_key(waiting),
        pixels=pixels(waiting),
    )


def journal_key(waiting: Row) -> JournalKey:
    return JournalKey(waiting["segment"], waiting["offset"], waiting["length"])


def pixels(waiting: Row) -> Pixels:
    if waiting["encoding"] == "image":
        return Pixels()
    return Pixels("raw", (waiting["height"], waiting["width"], waiting["channels"]))


def stage_rows(outcome: Outcome) -> list[Row]:
    return [
        {
            "inspection_id": outcome.inspection_id,
            "step": step,
            "expert": stage.expert,
            "expert_version": stage.expert_version,
            "label": stage.label,
            "confidence": _finite(stage.confidence),
            "device": stage.device,
            "executor": stage.executor,
            "batch_id": stage.batch_id,
            "batch_size": stage.batch_size,
            "queued_ms": _milliseconds(stage.queued_ms),
            "load_ms": _milliseconds(stage.load_ms),
            "infer_ms": _milliseconds(stage.infer_ms),
        }
        for step, stage in enumerate(outcome.stages)
    ]


def detection_rows(outcome: Outcome) -> list[Row]:
    return [
        {
            "inspection_id": outcome.inspection_id,
            "step": step,
            "label": detection.label,
            "confidence": float(detection.confidence),
            **{name: float(value) for name, value in zip(("x1", "y1", "x2", "y2"), detection.box, strict=True)},
        }
        for step, stage in enumerate(outcome.stages)
        for detection in stage.detections
    ]


def switch_row(switch: ExpertSwitch) -> Row:
    return {
        "at": utc_text(switch.at_wall_s),
        "executor": switch.executor,
        "device": switch.device,
        "loaded": switch.loaded,
        "evicted": json.dumps(switch.evicted),
        "bytes": switch.bytes,
        "load_ms": _milliseconds(switch.load_ms),
        "tier": switch.tier,
        "cause": switch.cause,
    }


def expert_version_row(version: ExpertVersion, at: str) -> Row:
    return {
        "expert": version.expert,
        "expert_version": version.expert_version,
        "sha256": version.sha256,
        "architecture": version.architecture,
        "classes": json.dumps(version.classes, ensure_ascii=False),
        "bytes": version.bytes,
        "dtype": version.dtype,
        "origin": version.origin,
        "first_used_at": at,
    }


def _milliseconds(value: float) -> float:
    """To the microsecond: what is stored is what is published, and nobody measures finer."""
    return round(float(value), 3)


def _finite(value: float | None) -> float | None:
    """NaN and infinity are no JSON, and SQLite would keep NaN as null."""
    return float(value) if value is not None and math.isfinite(value) else None
