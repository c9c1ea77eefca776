"""An audit after a run: is every image that a publisher heard `accepted` for in the results, once, with a verdict?"""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.stress.line import BOARD_TYPE, IMAGES_PER_BOARD


def audit(database: Path, accepted: Mapping[str, int]) -> dict[str, Any]:
    """Return by name what is wrong, nothing if all is right; `accepted` counts the images of each source.

    Whole boards of the stress line must have closed as complete.
    """
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:

        def one(sql: str, *values: object) -> Any:
            return connection.execute(sql, values).fetchone()[0]

        judged = (
            "SELECT count(DISTINCT image_id) FROM inspections WHERE source = ? AND status = 'done'"
            " AND verdict IS NOT NULL"
        )
        complete = (
            "SELECT count(*) FROM boards WHERE board_type = ? AND serial LIKE ? AND reason = 'complete'"
            " AND inspected = expected"
        )
        integrity = one("PRAGMA integrity_check")
        wrong = {
            "images lost": sum(images - one(judged, source) for source, images in accepted.items()),
            "boards not complete": sum(
                images // IMAGES_PER_BOARD - one(complete, BOARD_TYPE, f"{source}-%")
                for source, images in accepted.items()
            ),
            "images without a verdict": one("SELECT count(*) FROM inspections WHERE verdict IS NULL"),
            "gaps in seq": one("SELECT max(seq) - min(seq) + 1 - count(*) FROM stream"),
            "integrity": "" if integrity == "ok" else integrity,
        }
    return {name: value for name, value in wrong.items() if value}
