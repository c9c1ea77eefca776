"""Queries for the images and boards of all lines in a plant's hub, each with its line."""

from collections.abc import Sequence
from datetime import UTC, timedelta
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, Integer, Text, and_, cast, func, select, true

from daemon.consumers.plant.tables import final_boards, final_images, yields_by_hour
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


_IMAGE_COLUMNS: dict[str, ColumnElement[Any]] = {
    "line": final_images.c.line,
    "seq": final_images.c.seq,
    "completed_at": _text(final_images.c.at),
    "board_type": final_images.c.board_type,
    "serial": final_images.c.board_serial,
    **{name: final_images.c[name] for name in ("attempt", "component", "designator")},
    "verdict": final_images.c.final_verdict,
    "defect": final_images.c.final_defect,
    **{name: final_images.c[name] for name in ("reason", "latency_ms")},
    "decided_by": final_images.c.decided_by,
    "daemon_verdict": final_images.c.verdict,
    "daemon_defect": final_images.c.defect,
    "late": cast(final_images.c.late, Integer),
    **{
        name: final_images.c[name]
        for name in (
            *("lot", "station", "source", "image_id", "inspection_id", "rules_version"),
            *("expert", "expert_version", "label", "confidence", "epoch"),
        )
    },
    "decided_at": _text(final_images.c.decided_at),
    "note": final_images.c.note,
}
_BOARD_COLUMNS: dict[str, ColumnElement[Any]] = {
    "line": final_boards.c.line,
    "seq": final_boards.c.seq,
    "completed_at": _text(final_boards.c.at),
    "board_type": final_boards.c.board_type,
    "serial": final_boards.c.board_serial,
    "attempt": final_boards.c.attempt,
    "lot": final_boards.c.lot,
    "verdict": final_boards.c.final_verdict,
    "decided_by": final_boards.c.decided_by,
    "decided_at": _text(final_boards.c.decided_at),
    "daemon_verdict": final_boards.c.verdict,
    **{name: final_boards.c[name] for name in ("reason", "expected", "inspected", "station", "rules_version", "epoch")},
    **{name: cast(final_boards.c[name], Text) for name in ("missing", "failed", "review", "unknown")},
}

PLANT_IMAGES = RowKind(
    "images at the hub",
    _IMAGE_COLUMNS,
    final_images,
    true(),
    (final_images.c.at, final_images.c.line, final_images.c.epoch, final_images.c.seq),
    ("line", *(name for name in IMAGES.terminal_columns if name in _IMAGE_COLUMNS and name != "inspection_id")),
    final_images.c.at,
    windows=partial(_days, final_images.c.at),
)
PLANT_BOARDS = RowKind(
    "boards at the hub",
    _BOARD_COLUMNS,
    final_boards,
    true(),
    (final_boards.c.at, final_boards.c.line, final_boards.c.epoch, final_boards.c.seq),
    ("line", *(name for name in BOARDS.terminal_columns if name in _BOARD_COLUMNS)),
    final_boards.c.at,
    windows=partial(_days, final_boards.c.at),
)
