"""Queries for the images and boards of all lines in a plant's hub, each with its line."""

from collections.abc import Sequence
from datetime import UTC, timedelta
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, FromClause, Integer, Text, and_, cast, func, select, true

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


#: The hub's names of columns, and the types that a line's own rows have, where they differ.
_NAMES = {"completed_at": "at", "serial": "board_serial", "verdict": "final_verdict", "defect": "final_defect"}
_NAMES |= {"daemon_verdict": "verdict", "daemon_defect": "defect"}
_TYPES: dict[str, Any] = {"late": Integer, **dict.fromkeys(("missing", "failed", "review", "unknown"), Text)}


def _columns(view: FromClause, *names: str) -> dict[str, ColumnElement[Any]]:
    columns: dict[str, ColumnElement[Any]] = {name: view.c[_NAMES.get(name, name)] for name in names}
    times = {name: _text(column) for name, column in columns.items() if name.endswith("_at")}
    return columns | times | {name: cast(columns[name], kind) for name, kind in _TYPES.items() if name in columns}


_IMAGE_COLUMNS = _columns(
    final_images,
    *("line", "seq", "completed_at", "board_type", "serial", "attempt", "component", "designator"),
    *("verdict", "defect", "reason", "latency_ms", "decided_by", "daemon_verdict", "daemon_defect", "late"),
    *("lot", "station", "source", "image_id", "inspection_id", "rules_version", "expert", "expert_version"),
    *("label", "confidence", "epoch", "decided_at", "note"),
)
_BOARD_COLUMNS = _columns(
    final_boards,
    *("line", "seq", "completed_at", "board_type", "serial", "attempt", "lot", "verdict", "decided_by", "decided_at"),
    *("daemon_verdict", "reason", "expected", "inspected", "station", "rules_version", "epoch"),
    *("missing", "failed", "review", "unknown"),
)

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
