"""Rows into the messages of the results stream (PROTOCOL.md, Results stream).

The writer publishes what it just stored and the reader repeats what was stored: both render the same rows here, so
that a consumer that catches up gets what a live one got.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from daemon.records import Published

Row = Mapping[Any, Any]


def topic(kind: str, *parts: str) -> str:
    """`inspection/<board type>/<serial>/`: what is outside `[A-Za-z0-9._:-]` is percent-encoded."""
    # quote() leaves the tilde alone whatever `safe` says.
    encoded = (quote(part, safe="._:-").replace("~", "%7E") for part in parts)
    return "/".join((kind, *encoded, ""))


def inspection(row: Row, stages: Sequence[Row], detections: Sequence[Row]) -> Published:
    """`row` is of `inspections`, with the board's `board_type`, `serial` and `attempt`."""
    body = {
        "seq": row["seq"],
        "at": row["completed_at"],
        "id": row["image_id"],
        "source": row["source"],
        "board": _board(row),
        "component": row["component"],
        "designator": row["designator"],
        "verdict": row["verdict"],
        "defect": row["defect"],
        "reason": row["reason"],
        "late": bool(row["late"]),
        "stages": [_stage(stage, [box for box in detections if box["step"] == stage["step"]]) for stage in stages],
        "latency_ms": row["latency_ms"],
        "rules_version": row["rules_version"],
    }
    return Published(row["seq"], topic("inspection", row["board_type"], row["serial"]), body)


def board(row: Row) -> Published:
    """`row` is of `boards`, closed."""
    body = {
        "seq": row["seq"],
        "at": row["completed_at"],
        "board": _board(row),
        "verdict": row["verdict"],
        "expected": row["expected"],
        "inspected": row["inspected"],
        "failed": json.loads(row["failed"] or "[]"),
        "missing": json.loads(row["missing"] or "[]"),
        "reason": row["reason"],
    }
    return Published(row["seq"], topic("board", row["board_type"], row["serial"]), body)


def generation(row: Row) -> Published:
    """`row` is of `generations`, finished."""
    body: dict[str, Any] = {"seq": row["seq"], "at": row["completed_at"], "id": row["request_id"]}
    for name in (
        *("source", "model", "mode", "task", "text", "prompt_tokens", "new_tokens"),
        *("ttft_ms", "tpot_ms", "total_ms", "status", "reason"),
    ):
        body[name] = row[name]
    return Published(row["seq"], topic("generation", row["source"]), body)


def _board(row: Row) -> dict[str, Any]:
    """The board as sent (an absent lot or station stays absent), with its attempt."""
    sent = {"type": row["board_type"], "serial": row["serial"]}
    sent |= {name: row[name] for name in ("lot", "station") if row[name] is not None}
    return sent | {"attempt": row["attempt"]}


def _stage(row: Row, boxes: Sequence[Row]) -> dict[str, Any]:
    return {
        "expert": row["expert"],
        "version": row["expert_version"],
        "label": row["label"],
        "confidence": row["confidence"],
        "detections": [
            {
                "label": box["label"],
                "confidence": box["confidence"],
                "box": [box["x1"], box["y1"], box["x2"], box["y2"]],
            }
            for box in boxes
        ],
        "device": row["device"],
        "batch": row["batch_size"],
        "queued_ms": row["queued_ms"],
        "load_ms": row["load_ms"],
        "infer_ms": row["infer_ms"],
    }
