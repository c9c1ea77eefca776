"""The rows that people query (images, stages, boards), their columns and filters.

Verdicts count reviews: an image's newest, a board's by the view `final_boards`. A filter's value is always a bound
parameter, and column names come from this module only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from unicodedata import normalize

from sqlalchemy import (
    REAL,
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Integer,
    case,
    exists,
    func,
    literal,
    select,
)

from daemon.storage.database.boards import has_serial
from daemon.storage.database.reviews import DAEMON
from daemon.storage.database.schema import FINAL_BOARDS, boards, inspections, reviews, stages
from tools.terminal.console import CommandError

#: `time` is UTC text such as 2026-11-21T09:28:11.123Z.
ColumnType = Literal["text", "int", "real", "time"]


@dataclass(frozen=True, slots=True)
class RowKind:
    """Columns by name, their tables, the columns that number a row, and those of a terminal, the best first."""

    name: str
    columns: Mapping[str, ColumnElement[Any]]
    tables: FromClause
    is_finished: ColumnElement[bool]
    #: The first goes in the direction of the order, the others always upwards.
    key: tuple[ColumnElement[Any], ...]
    terminal_columns: tuple[str, ...]
    #: What `since` and `until` are compared with.
    time: ColumnElement[Any]
    #: Conditions, each looked through quickly, that cover all rows, oldest first; None for numbers of the stream.
    windows: "Callable[[Connection, RowFilters], Sequence[ColumnElement[bool]]] | None" = None

    def column_type(self, name: str) -> ColumnType:
        """Return the type under which a program should read a column."""
        declared = self.columns[name].type
        if name == "at" or name.endswith("_at"):
            return "time"
        if isinstance(declared, (Integer, BigInteger)):
            return "int"
        return "real" if isinstance(declared, REAL) or declared.__visit_name__ in {"double", "float"} else "text"


#: An image's newest review. The view `final_verdicts` groups all reviews first, which is too slow for a few images.
_newest_review = (
    select(func.max(reviews.c.review_id))
    .where(reviews.c.inspection_id == inspections.c.inspection_id)
    .correlate(inspections)
    .scalar_subquery()
)
_is_reviewed = reviews.c.review_id.is_not(None)
_image_tables = inspections.join(boards, boards.c.board_id == inspections.c.board_id).outerjoin(
    reviews, reviews.c.review_id == _newest_review
)

_IMAGE_COLUMNS: dict[str, ColumnElement[Any]] = {
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
    "decided_by": func.coalesce(reviews.c.reviewer, DAEMON),
    "daemon_verdict": inspections.c.verdict,
    "daemon_defect": inspections.c.defect,
    "late": inspections.c.late,
    "lot": boards.c.lot,
    "station": boards.c.station,
    **{
        name: inspections.c[name]
        for name in (
            *("source", "image_id", "inspection_id", "captured_at", "accepted_at", "deadline_ms", "rules_version"),
            *("image_bytes", "image_sha256", "image_path", "board_id"),
        )
    },
    "decided_at": reviews.c.at,
    "note": reviews.c.note,
}
_STAGE_COLUMNS: dict[str, ColumnElement[Any]] = {
    "seq": inspections.c.seq,
    "step": stages.c.step,
    "completed_at": inspections.c.completed_at,
    **{
        name: stages.c[name]
        for name in (
            *("expert", "expert_version", "label", "confidence", "device", "executor", "batch_id", "batch_size"),
            *("queued_ms", "load_ms", "infer_ms", "expert_settings"),
        )
    },
}
_BOARD_COLUMNS: dict[str, ColumnElement[Any]] = {
    **{name: boards.c[name] for name in ("seq", "completed_at", "board_type", "serial", "attempt", "lot")},
    **{name: FINAL_BOARDS.c[name] for name in ("verdict", "decided_by", "decided_at")},
    "daemon_verdict": boards.c.verdict,
    **{
        name: boards.c[name]
        for name in (
            *("reason", "expected", "inspected", "station", "board_id", "first_seen_at", "rules_version", "missing"),
            *("failed", "review", "unknown", "attributes"),
        )
    },
}

IMAGES = RowKind(
    "images",
    _IMAGE_COLUMNS,
    _image_tables,
    inspections.c.status == "done",
    (inspections.c.seq,),
    (
        *("serial", "designator", "component", "verdict", "defect", "reason", "inspection_id", "completed_at"),
        *("board_type", "decided_by", "latency_ms", "lot", "station", "attempt"),
    ),
    inspections.c.completed_at,
)
STAGES = RowKind(
    "stages",
    _STAGE_COLUMNS | {name: column for name, column in _IMAGE_COLUMNS.items() if name not in _STAGE_COLUMNS},
    _image_tables.join(stages, stages.c.inspection_id == inspections.c.inspection_id),
    inspections.c.status == "done",
    (inspections.c.seq, stages.c.step),
    (
        *("serial", "designator", "step", "expert", "label", "confidence", "verdict", "expert_version"),
        *("queued_ms", "load_ms", "infer_ms", "batch_size", "executor", "component", "completed_at"),
    ),
    inspections.c.completed_at,
)
BOARDS = RowKind(
    "boards",
    _BOARD_COLUMNS,
    boards.join(FINAL_BOARDS, FINAL_BOARDS.c.board_id == boards.c.board_id),
    boards.c.verdict.is_not(None),
    (boards.c.seq,),
    (
        *("serial", "attempt", "verdict", "daemon_verdict", "decided_by", "decided_at", "board_id", "reason"),
        *("inspected", "expected", "board_type", "lot", "completed_at", "station", "rules_version"),
    ),
    boards.c.completed_at,
)


@dataclass(frozen=True, slots=True)
class RowFilters:
    """Conditions on rows: `equal` has the values that a column may have. Times are UTC text, `until` is exclusive."""

    equal: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    since: str | None = None
    until: str | None = None
    latency_above_ms: float | None = None
    seq_from: int | None = None
    seq_to: int | None = None

    def __post_init__(self) -> None:
        equal = {
            name: [*dict.fromkeys([*values, *(normalize("NFC", each) for each in values if isinstance(each, str))])]
            for name, values in self.equal.items()
        }
        object.__setattr__(self, "equal", equal)

    def conditions(self, rows: RowKind) -> list[ColumnElement[bool]]:
        """Return the conditions on `rows`; CommandError names filters that these rows lack."""
        equal = dict(self.equal)
        of_any_stage: list[ColumnElement[bool]] = []
        if rows is IMAGES:  # a row of an image has no expert: one of its stages has
            names = [name for name in ("expert", "expert_version", "expert_settings") if name in equal]
            of_any_stage = [stages.c[name].in_(equal.pop(name)) for name in names]
        unknown = [name for name in equal if name not in rows.columns]
        if self.latency_above_ms is not None and "latency_ms" not in rows.columns:
            unknown.append("latency_ms")
        if unknown:
            raise CommandError(f"{rows.name} have no {', '.join(unknown)}", status=2)
        serials = equal.pop("serial", None)
        conditions = [rows.is_finished, *(rows.columns[name].in_(values) for name, values in equal.items())]
        if serials is not None:
            of_hub = rows.columns["serial"].in_(serials)
            conditions.append(has_serial(*serials) if rows.windows is None else of_hub)
        if of_any_stage:
            conditions.append(exists().where(stages.c.inspection_id == inspections.c.inspection_id, *of_any_stage))
        bounds = [
            (rows.time, ">=", self.since),
            (rows.time, "<", self.until),
            (rows.columns.get("latency_ms", rows.time), ">", self.latency_above_ms),
            (rows.columns["seq"], ">=", self.seq_from),
            (rows.columns["seq"], "<=", self.seq_to),
        ]
        return conditions + [
            column.op(sign, is_comparison=True)(literal(value, column.type))
            for column, sign, value in bounds
            if value is not None
        ]
