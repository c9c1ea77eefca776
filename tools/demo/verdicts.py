"""What the database says of one board's parts: verdicts, and the boxes that detectors drew."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import text

from daemon.config.settings import load_config
from daemon.storage.database.connections import StoreError, open_for_reading

_PARTS = """
SELECT i.inspection_id, i.designator, i.verdict, i.defect FROM inspections AS i
JOIN boards AS b ON b.board_id = i.board_id WHERE b.serial = :serial AND i.status = 'done'
"""
_BOXES = """
SELECT d.inspection_id, d.label, d.confidence, d.x1, d.y1, d.x2, d.y2 FROM detections AS d
JOIN inspections AS i ON i.inspection_id = d.inspection_id
JOIN boards AS b ON b.board_id = i.board_id WHERE b.serial = :serial
"""


@dataclass(frozen=True, slots=True)
class PartVerdict:
    """One part's verdict; boxes are (label, confidence, (x1, y1, x2, y2)) in pixels of the part's image."""

    verdict: str
    defect: str | None
    boxes: tuple[tuple[str, float, tuple[float, float, float, float]], ...]


def part_verdicts(config: Path, serial: str) -> dict[str, PartVerdict]:
    """Designator to verdict of the board `serial`; empty where the line has not seen it."""
    try:
        engine = open_for_reading(load_config(config).database)
    except StoreError:
        return {}
    try:
        with engine.connect() as connection:
            boxes = defaultdict(list)
            for inspection_id, label, confidence, *box in connection.execute(text(_BOXES), {"serial": serial}):
                boxes[inspection_id].append((label, confidence, tuple(box)))
            return {
                designator: PartVerdict(verdict, defect, tuple(boxes[inspection_id]))
                for inspection_id, designator, verdict, defect in connection.execute(text(_PARTS), {"serial": serial})
            }
    finally:
        engine.dispose()
