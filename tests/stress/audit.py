"""An audit after a run: is every image that a publisher heard `accepted` for in the results, once, with a verdict?"""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tests.stress.line import BOARD_TYPE, IMAGES_PER_BOARD


@dataclass(frozen=True, slots=True)
class ResultsAudit:
    """`lost` are accepted images without a final row; `gaps` are numbers missing in `seq`; both should be 0."""

    accepted: int
    lost: int
    pending: int
    gaps: int
    boards_open: int
    boards_wrong: int
    integrity: str

    @property
    def holds(self) -> bool:
        return not (self.lost or self.pending or self.gaps or self.boards_wrong) and self.integrity == "ok"


def audit(database: Path, accepted: Iterable[tuple[str, int]]) -> ResultsAudit:
    """Compare the results with `accepted`, pairs of a source and its count; ids are `source/0`, `source/1` and so on.

    Whole boards of the stress line must have closed as complete.
    """
    promised = list(accepted)
    lost = boards_wrong = 0
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:

        def count(sql: str, *values: object) -> int:
            return int(connection.execute(sql, values).fetchone()[0] or 0)

        for source, images in promised:
            finished = connection.execute(
                "SELECT image_id FROM inspections WHERE source = ? AND status = 'done' AND verdict IS NOT NULL",
                (source,),
            )
            lost += len({f"{source}/{number}" for number in range(images)} - {image_id for (image_id,) in finished})
            complete = count(
                "SELECT count(*) FROM boards WHERE board_type = ? AND serial LIKE ? AND reason = 'complete' "
                "AND inspected = expected",
                BOARD_TYPE,
                f"{source}-%",
            )
            boards_wrong += max(0, images // IMAGES_PER_BOARD - complete)
        first, last, rows = connection.execute("SELECT min(seq), max(seq), count(*) FROM stream").fetchone()
        return ResultsAudit(
            accepted=sum(images for _, images in promised),
            lost=lost,
            pending=count("SELECT count(*) FROM inspections WHERE verdict IS NULL"),
            gaps=(last - first + 1 - rows) if rows else 0,
            boards_open=count("SELECT count(*) FROM boards WHERE verdict IS NULL"),
            boards_wrong=boards_wrong,
            integrity=str(connection.execute("PRAGMA integrity_check").fetchone()[0]),
        )
