"""After a run: is every image that a publisher was told is accepted in the results, once, with a verdict?"""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Books:
    """`lost` are accepted images without a final row; `gaps` are numbers missing in `seq`; both should be 0."""

    accepted: int
    lost: int
    pending: int
    gaps: int
    boards_open: int
    boards_wrong: int
    integrity: str

    @property
    def balance(self) -> bool:
        return not (self.lost or self.pending or self.gaps or self.boards_wrong) and self.integrity == "ok"


def audit(database: Path, accepted: Iterable[tuple[str, int]], board_type: str, board_images: int) -> Books:
    """`accepted` are (source, how many): a source's image ids are `source/0`, `source/1` and so on.

    Whole boards of `board_type`, of `board_images` each, must have closed as complete.
    """
    promised = list(accepted)
    lost = boards_wrong = 0
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:

        def one(sql: str, *values: object) -> int:
            return int(connection.execute(sql, values).fetchone()[0] or 0)

        for source, count in promised:
            found = {
                row[0]
                for row in connection.execute(
                    "SELECT image_id FROM inspections WHERE source = ? AND status = 'done' AND verdict IS NOT NULL",
                    (source,),
                )
            }
            lost += sum(f"{source}/{number}" not in found for number in range(count))
            complete = one(
                "SELECT count(*) FROM boards WHERE board_type = ? AND serial LIKE ? AND reason = 'complete' "
                "AND inspected = expected",
                board_type,
                f"{source}-%",
            )
            boards_wrong += max(0, count // board_images - complete)
        first, last, rows = connection.execute("SELECT min(seq), max(seq), count(*) FROM stream").fetchone()
        return Books(
            accepted=sum(count for _, count in promised),
            lost=lost,
            pending=one("SELECT count(*) FROM inspections WHERE verdict IS NULL"),
            gaps=(last - first + 1 - rows) if rows else 0,
            boards_open=one("SELECT count(*) FROM boards WHERE verdict IS NULL"),
            boards_wrong=boards_wrong,
            integrity=str(connection.execute("PRAGMA integrity_check").fetchone()[0]),
        )
