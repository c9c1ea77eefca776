"""What can be asked for: images, stages or boards, each with its columns, and the filters over them.

A value of a filter is always a bound parameter, whatever stands in it; column names come from here alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import REAL, BigInteger, ColumnElement, FromClause, Integer, and_, case, exists, func, select
from sqlalchemy.sql.type_api import TypeEngine

from daemon.storage.database.schema import boards, inspections, reviews, stages
from daemon.storage.database.serials import has_serial

#: `time` is UTC text such as 2026-11-21T09:28:11.123Z.
Kind = Literal["text", "int", "real", "time"]


@dataclass(frozen=True, slots=True)
class Rows:
    """One kind of row. `joined` holds its tables, `key` numbers its rows, `shown` is the table's columns by weight."""

    name: str
    columns: Mapping[str, ColumnElement[Any]]
    joined: FromClause
    finished: ColumnElement[bool]
    key: tuple[str, ...]
    shown: tuple[str, ...]

    def kind(self, name: str) -> Kind:
        return kind_of(name, self.columns[name].type)


@dataclass(frozen=True, slots=True)
class Filters:
    """What rows must be like: `equal` has the values that a column may have; the rest says itself."""

    equal: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    since: str | None = None
    until: str | None = None
    latency_above_ms: float | None = None
    seq_from: int | None = None
    seq_to: int | None = None


class NotAskedOfError(ValueError):
    """A filter or column that this kind of row does not have."""


def kind_of(name: str, declared: "TypeEngine[Any]") -> Kind:
    """What a column holds, as a program that reads it would declare it."""
    if name == "at" or name.endswith("_at"):
        return "time"
    if isinstance(declared, (Integer, BigInteger)):
        return "int"
    return "real" if isinstance(declared, REAL) or declared.__visit_name__ in {"double", "float"} else "text"


def conditions(rows: Rows, filters: Filters) -> list[ColumnElement[bool]]:
    """`filters` as conditions on `rows`; NotAskedOfError names those that these rows know nothing of."""
    equal = dict(filters.equal)
    of_a_stage: list[ColumnElement[bool]] = []
    if rows is IMAGES:  # one of its experts, whichever
        of_a_stage = [stages.c[name].in_(equal.pop(name)) for name in _STAGE_FILTERS if name in equal]
    unknown = [name for name in equal if name not in rows.columns]
    if filters.latency_above_ms is not None and "latency_ms" not in rows.columns:
        unknown.append("latency_ms")
    if unknown:
        raise NotAskedOfError(f"{rows.name} have no {', '.join(unknown)}")
    serials = equal.pop("serial", None)
    found = [rows.finished, *(rows.columns[name].in_(values) for name, values in equal.items())]
    found += [has_serial(*serials)] if serials is not None else []
    if of_a_stage:
        found.append(exists().where(stages.c.inspection_id == inspections.c.inspection_id, *of_a_stage))
    bounds = [
        ("completed_at", ">=", filters.since),
        ("completed_at", "<", filters.until),
        ("latency_ms", ">", filters.latency_above_ms),
        ("seq", ">=", filters.seq_from),
        ("seq", "<=", filters.seq_to),
    ]
    found += [
        rows.columns[name].op(sign, is_comparison=True)(value) for name, sign, value in bounds if value is not None
    ]
    return found


_STAGE_FILTERS = ("expert", "expert_version")

#: An image's newest review. The view `final_verdicts` groups all reviews first, which many small questions cannot pay.
_newest = (
    select(func.max(reviews.c.review_id))
    .where(reviews.c.inspection_id == inspections.c.inspection_id)
    .correlate(inspections)
    .scalar_subquery()
)
_is_reviewed = reviews.c.review_id.is_not(None)
_images = inspections.join(boards, boards.c.board_id == inspections.c.board_id).outerjoin(
    reviews, reviews.c.review_id == _newest
)

_IMAGE: dict[str, ColumnElement[Any]] = {
    "seq": inspections.c.seq,
    "completed_at": inspections.c.completed_at,
    "board_type": boards.c.board_type,
    "serial": boards.c.serial,
    "attempt": boards.c.attempt,
    "component": inspections.c.component,
    "designator": inspections.c.designator,
    "verdict": case((_is_reviewed, reviews.c.verdict), else_=inspections.c.verdict),
    "defect": case((_is_reviewed, reviews.c.defect), else_=inspections.c.defect),
    "reason": inspections.c.reason,
    "latency_ms": inspections.c.latency_ms,
    "decided_by": func.coalesce(reviews.c.reviewer, "daemon"),
    "daemon_verdict": inspections.c.verdict,
    "daemon_defect": inspections.c.defect,
    "late": inspections.c.late,
    "lot": boards.c.lot,
    "station": boards.c.station,
    "source": inspections.c.source,
    "image_id": inspections.c.image_id,
    "inspection_id": inspections.c.inspection_id,
    "captured_at": inspections.c.captured_at,
    "accepted_at": inspections.c.accepted_at,
    "deadline_ms": inspections.c.deadline_ms,
    "rules_version": inspections.c.rules_version,
    "image_bytes": inspections.c.image_bytes,
    "image_sha256": inspections.c.image_sha256,
    "image_path": inspections.c.image_path,
}
_STAGE: dict[str, ColumnElement[Any]] = {
    "seq": inspections.c.seq,
    "step": stages.c.step,
    "completed_at": inspections.c.completed_at,
    **{name: stages.c[name] for name in ("expert", "expert_version", "label", "confidence")},
    **{
        name: stages.c[name]
        for name in ("device", "executor", "batch_id", "batch_size", "queued_ms", "load_ms", "infer_ms")
    },
}
_BOARD: dict[str, ColumnElement[Any]] = {
    name: boards.c[name]
    for name in (
        *("seq", "completed_at", "board_type", "serial", "attempt", "lot", "verdict", "reason", "expected"),
        *("inspected", "station", "board_id", "first_seen_at", "rules_version", "missing"),
    )
}

IMAGES = Rows(
    "images",
    _IMAGE,
    _images,
    inspections.c.status == "done",
    ("seq",),
    (
        *("serial", "designator", "verdict", "component", "defect", "reason", "board_type", "decided_by"),
        *("latency_ms", "completed_at", "lot", "station", "attempt"),
    ),
)
STAGES = Rows(
    "stages",
    _STAGE | {name: value for name, value in _IMAGE.items() if name not in _STAGE},
    _images.join(stages, stages.c.inspection_id == inspections.c.inspection_id),
    inspections.c.status == "done",
    ("seq", "step"),
    (
        *("serial", "designator", "step", "expert", "label", "confidence", "verdict", "expert_version"),
        *("queued_ms", "load_ms", "infer_ms", "batch_size", "executor", "component", "completed_at"),
    ),
)
BOARDS = Rows(
    "boards",
    _BOARD,
    boards,
    boards.c.verdict.is_not(None),
    ("seq",),
    (
        *("serial", "attempt", "verdict", "board_type", "reason", "inspected", "expected", "lot", "completed_at"),
        *("station", "rules_version"),
    ),
)


def of_boards(rows: Rows, board_ids: Sequence[int]) -> ColumnElement[bool]:
    """The rows of these boards alone."""
    return (boards if rows is BOARDS else inspections).c.board_id.in_(board_ids)


def after(rows: Rows, last: Sequence[Any], *, newest_first: bool) -> ColumnElement[bool]:
    """What comes behind the row with the key `last`. Stages of one image come by step, whatever the direction."""
    seq = rows.columns["seq"]
    beyond = seq < last[0] if newest_first else seq > last[0]
    if len(rows.key) == 1:
        return beyond
    # The first half alone is what the index over `seq` can use.
    from_here = seq <= last[0] if newest_first else seq >= last[0]
    return and_(from_here, beyond | (rows.columns["step"] > last[1]))
