"""Rows for `coserve results`, read from the line's database by plain SQL over the views' tables."""

from pathlib import Path
from typing import Any

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from daemon.config import load_config
from daemon.errors import ConfigError
from daemon.store.database import StoreError, open_for_reading
from tools.console import fail

_INSPECTIONS = """
SELECT i.seq, i.completed_at, b.board_type, b.serial, b.attempt, i.component, i.designator, f.verdict, f.defect,
       i.reason, i.latency_ms, f.decided_by
FROM inspections AS i
JOIN boards AS b ON b.board_id = i.board_id
JOIN final_verdicts AS f ON f.inspection_id = i.inspection_id
WHERE (:serial IS NULL OR b.serial = :serial) AND (:verdict IS NULL OR f.verdict = :verdict)
  AND (:component IS NULL OR i.component = :component)
ORDER BY i.seq DESC LIMIT :limit
"""

_BOARDS = """
SELECT seq, completed_at, board_type, serial, attempt, lot, verdict, reason, expected, inspected
FROM boards
WHERE verdict IS NOT NULL AND (:serial IS NULL OR serial = :serial) AND (:verdict IS NULL OR verdict = :verdict)
ORDER BY seq DESC LIMIT :limit
"""


def newest_inspections(
    config: Path, *, serial: str | None, verdict: str | None, component: str | None, limit: int
) -> list[dict[str, Any]]:
    """The newest finished images with their final verdicts (an operator's decision wins), newest first."""
    return _rows(config, _INSPECTIONS, serial=serial, verdict=verdict, component=component, limit=limit)


def newest_boards(config: Path, *, serial: str | None, verdict: str | None, limit: int) -> list[dict[str, Any]]:
    """The newest closed board attempts, newest first."""
    return _rows(config, _BOARDS, serial=serial, verdict=verdict, limit=limit)


def _rows(config: Path, sql: str, **parameters: Any) -> list[dict[str, Any]]:
    try:
        settings = load_config(config)
    except ConfigError as error:
        fail(str(error), status=2)
    try:
        engine = open_for_reading(settings.database)
    except StoreError as error:
        fail(str(error), status=1)
    try:
        with engine.connect() as connection:
            return [dict(row) for row in connection.execute(text(sql), parameters).mappings()]
    except SQLAlchemyError as error:
        fail(
            f"cannot read {settings.database} ({error.__class__.__name__}): has this line run? coserve run {config}", 1
        )
    finally:
        engine.dispose()
