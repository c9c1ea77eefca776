"""Queries for the images and boards of all lines in a plant's hub, each with its line."""

from collections.abc import Sequence
from datetime import UTC, timedelta
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, Integer, Text, and_, case, cast, func, select, true

from daemon.consumers.plant.tables import boards, inspections, reviews, yields_by_hour
from daemon.storage.database.reviews import DAEMON
from tools.query.rows import BOARDS, IMAGES, RowFilters, RowKind

_UTC_TEXT = 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'


def _text(at: ColumnElement[Any]) -> ColumnElement[Any]:
    return func.to_char(func.timezone("UTC", at), _UTC_TEXT, type_=Text)


def _days(at: ColumnElement[Any], connection: Connection, filters: RowFilters) -> Sequence[ColumnElement[bool]]:
    """Return a condition for each day (UTC) on which a line finished anything, to read few partitions."""
    hour = yields_by_hour.c.hour
    day = func.date_trunc("day", hour, "UTC")
    since = [] if filters.since is None else [hour >= func.date_trunc("hour", cast(filters.since, hour.type), "UTC")]
    until = [] if filters.until is None else [hour < cast(filters.until, hour.type)]
    begins = connection.execute(select(day).where(*since, *until).distinct().order_by(day)).scalars()
    # PostgreSQL answers in the server's time zone, where a day may have 23 or 25 hours.
    edges = [(begin, begin + timedelta(days=1)) for begin in (begin.astimezone(UTC) for begin in begins)]
    return [and_(at >= begin, at < end) for begin, end in edges]


#: The newest decision about an image. A restored line counts again, so the same number may be that of another image.
_image_review = (
    select(reviews.c.verdict, reviews.c.defect, reviews.c.reviewer, reviews.c.at, reviews.c.note)
    .where(
        reviews.c.line == inspections.c.line,
        reviews.c.inspection_id == inspections.c.inspection_id,
        reviews.c.board_serial == inspections.c.board_serial,
        reviews.c.attempt == inspections.c.attempt,
    )
    .order_by(reviews.c.at.desc(), reviews.c.seq.desc())
    .limit(1)
    .lateral("image_review")
)
_board_review = (
    select(reviews.c.reviewer, reviews.c.at)
    .where(*(reviews.c[name] == boards.c[name] for name in ("line", "board_type", "board_serial", "attempt")))
    .order_by(reviews.c.at.desc(), reviews.c.seq.desc())
    .limit(1)
    .lateral("board_review")
)
_is_reviewed = _image_review.c.reviewer.is_not(None)


_IMAGE_COLUMNS: dict[str, ColumnElement[Any]] = {
    "line": inspections.c.line,
    "seq": inspections.c.seq,
    "completed_at": _text(inspections.c.at),
    "board_type": inspections.c.board_type,
    "serial": inspections.c.board_serial,
    **{name: inspections.c[name] for name in ("attempt", "component", "designator")},
    "verdict": case((_is_reviewed, _image_review.c.verdict), else_=inspections.c.verdict),
    "defect": case((_is_reviewed, _image_review.c.defect), else_=inspections.c.defect),
    **{name: inspections.c[name] for name in ("reason", "latency_ms")},
    "decided_by": func.coalesce(_image_review.c.reviewer, DAEMON),
    "daemon_verdict": inspections.c.verdict,
    "daemon_defect": inspections.c.defect,
    "late": cast(inspections.c.late, Integer),
    **{
        name: inspections.c[name]
        for name in (
            *("lot", "station", "source", "image_id", "inspection_id", "rules_version"),
            *("expert", "expert_version", "label", "confidence", "epoch"),
        )
    },
    "decided_at": _text(_image_review.c.at),
    "note": _image_review.c.note,
}
_BOARD_COLUMNS: dict[str, ColumnElement[Any]] = {
    "line": boards.c.line,
    "seq": boards.c.seq,
    "completed_at": _text(boards.c.at),
    "board_type": boards.c.board_type,
    "serial": boards.c.board_serial,
    "attempt": boards.c.attempt,
    "lot": boards.c.lot,
    "verdict": boards.c.final_verdict,
    "decided_by": func.coalesce(_board_review.c.reviewer, DAEMON),
    "decided_at": func.coalesce(_text(_board_review.c.at), _text(boards.c.at)),
    "daemon_verdict": boards.c.verdict,
    **{name: boards.c[name] for name in ("reason", "expected", "inspected", "station", "rules_version", "epoch")},
    **{name: cast(boards.c[name], Text) for name in ("missing", "failed", "review", "unknown")},
}

PLANT_IMAGES = RowKind(
    "images at the hub",
    _IMAGE_COLUMNS,
    inspections.outerjoin(_image_review, true()),
    true(),
    (inspections.c.at, inspections.c.line, inspections.c.epoch, inspections.c.seq),
    ("line", *(name for name in IMAGES.terminal_columns if name in _IMAGE_COLUMNS and name != "inspection_id")),
    inspections.c.at,
    windows=partial(_days, inspections.c.at),
)
PLANT_BOARDS = RowKind(
    "boards at the hub",
    _BOARD_COLUMNS,
    boards.outerjoin(_board_review, true()),
    true(),
    (boards.c.at, boards.c.line, boards.c.epoch, boards.c.seq),
    ("line", *(name for name in BOARDS.terminal_columns if name in _BOARD_COLUMNS)),
    boards.c.at,
    windows=partial(_days, boards.c.at),
)
