"""What the database knows of a board, and the same in plain words."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from daemon.storage.database.connections import StoreError, open_for_reading, shown
from daemon.storage.database.serials import folded
from tools.cli.console import fail

_ATTEMPTS = """
SELECT board_id, board_type, serial, attempt, lot, station, first_seen_at, completed_at, expected, inspected, verdict,
       reason, missing
FROM boards
WHERE board_id IN (SELECT board_id FROM boards WHERE lower(serial) = :folded) AND serial = :serial
  AND board_type = coalesce(:board_type, board_type)
ORDER BY board_id
"""

#: Everything that did not pass, or that an operator has decided upon.
_FINDINGS = """
SELECT i.inspection_id, i.designator, i.component, i.verdict AS first_verdict, f.verdict, f.defect, f.decided_by,
       i.reason, i.late
FROM inspections AS i JOIN final_verdicts AS f ON f.inspection_id = i.inspection_id
WHERE i.board_id = :board_id AND (f.verdict <> 'pass' OR i.verdict <> 'pass')
ORDER BY i.designator, i.inspection_id
"""

_PENDING = "SELECT count(*) FROM inspections WHERE board_id = :board_id AND status <> 'done'"

_STAGES = """
SELECT s.expert, s.label, s.confidence, d.label AS box
FROM stages AS s LEFT JOIN detections AS d ON d.inspection_id = s.inspection_id AND d.step = s.step
WHERE s.inspection_id = :inspection_id ORDER BY s.step, d.detection_id
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One image that did not pass. `seen` is what its experts said, in words."""

    designator: str
    component: str
    verdict: str
    defect: str | None
    reason: str | None
    decided_by: str
    late: bool
    seen: str


@dataclass(frozen=True, slots=True)
class BoardReport:
    """One attempt at a board, newest rows. `verdict` is None while it is open."""

    board_type: str
    serial: str
    attempt: int
    attempts: int
    lot: str | None
    station: str | None
    completed_at: str | None
    expected: int
    inspected: int
    pending: int
    verdict: str | None
    reason: str | None
    findings: tuple[Finding, ...]
    missing: tuple[dict[str, Any], ...]


def read_board(database: str, config: Path, serial: str, board_type: str | None, attempt: int | None) -> BoardReport:
    """The attempt that is asked for, or the newest. Ends the command with 1 where there is none."""
    try:
        engine = open_for_reading(database)
    except StoreError as error:
        fail(str(error), status=1)
    try:
        return _read(engine, serial, board_type, attempt)
    except SQLAlchemyError as error:
        why = f"cannot read {shown(database)} ({error.__class__.__name__})"
        fail(f"{why}: has this line run? coserve run {config}", status=1)
    finally:
        engine.dispose()


def _read(engine: Engine, serial: str, board_type: str | None, attempt: int | None) -> BoardReport:
    with engine.connect() as connection:

        def rows(sql: str, **values: Any) -> list[Any]:
            return list(connection.execute(text(sql), values).mappings())

        boards = rows(_ATTEMPTS, folded=folded(serial), serial=serial, board_type=board_type)
        types = sorted({row["board_type"] for row in boards})
        if len(types) > 1:
            fail(f"serial {serial} is on boards of several types: name one with --type ({', '.join(types)})", status=2)
        chosen = [row for row in boards if attempt in (None, row["attempt"])]
        if not chosen:
            which = f"attempt {attempt} at board {serial}" if boards else f"board with serial {serial}"
            fail(f"no {which} in the results: `coserve results --boards` lists those that closed last", status=1)
        board = chosen[-1]
        findings = [
            Finding(
                designator=row["designator"],
                component=row["component"],
                verdict=row["verdict"],
                defect=row["defect"],
                reason=row["reason"],
                decided_by=row["decided_by"],
                late=bool(row["late"]),
                seen=_seen(rows(_STAGES, inspection_id=row["inspection_id"])),
            )
            for row in rows(_FINDINGS, board_id=board["board_id"])
        ]
        (pending,) = rows(_PENDING, board_id=board["board_id"])[0].values()
    return BoardReport(
        board_type=board["board_type"],
        serial=serial,
        attempt=board["attempt"],
        attempts=len(boards),
        lot=board["lot"],
        station=board["station"],
        completed_at=board["completed_at"],
        expected=board["expected"],
        inspected=board["inspected"],
        pending=pending,
        verdict=board["verdict"],
        reason=board["reason"],
        findings=tuple(findings),
        missing=tuple(json.loads(board["missing"] or "[]")),
    )


def _seen(stages: Sequence[Any]) -> str:
    """What the experts of an image said: `R0402 saw tombstone (0.97)`, `yolo-solder found 2 × bridge`."""
    said: dict[str, str] = {}
    boxes: dict[str, Counter[str]] = {}
    for row in stages:
        boxes.setdefault(row["expert"], Counter())
        if row["label"] is not None:
            confidence = "" if row["confidence"] is None else f" ({row['confidence']:.2f})"
            said[row["expert"]] = f"{row['expert']} saw {row['label']}{confidence}"
        if row["box"] is not None:
            boxes[row["expert"]][row["box"]] += 1
    for expert, found in boxes.items():
        if expert not in said:
            listed = ", ".join(f"{count} × {label}" for label, count in found.items()) or "nothing"
            said[expert] = f"{expert} found {listed}"
    return "; ".join(said[expert] for expert in boxes)


_VERDICTS = {
    "pass": "passed",
    "fail": "FAILED",
    "review": "needs a person's look",
    "unknown": "could not be judged whole",
    None: "is still open",
}
_FOUND = {"fail": "failed", "review": "unsure", "unknown": "not judged", "pass": "passed"}


def in_words(board: BoardReport) -> str:
    """The report by the template: one line for the board, one for each finding."""
    of = f", lot {board.lot}" if board.lot else ""
    at = f", station {board.station}" if board.station else ""
    lines = [
        f"Board {board.serial} ({board.board_type}{of}{at}), attempt {board.attempt} of {board.attempts},"
        f" {_VERDICTS[board.verdict]}: {board.inspected} of {board.expected} positions inspected"
        + (f", {board.pending} images still to be judged" if board.pending else "")
        + (", its time ran out" if board.reason == "time_limit" else "")
        + "."
    ]
    lines += [f"- {_finding_in_words(finding)}" for finding in board.findings]
    lines += [f"- {_missing_in_words(missing)}" for missing in board.missing]
    if len(lines) == 1:
        lines.append("Nothing was found wrong with it.")
    return "\n".join(lines)


def _finding_in_words(finding: Finding) -> str:
    what = f"{finding.designator} ({finding.component}) {_FOUND[finding.verdict]}"
    why = [f"defect {finding.defect}"] if finding.defect else []
    why += [f"reason {finding.reason}"] if finding.reason else []
    why += [finding.seen] if finding.seen else []
    why += [f"decided by {finding.decided_by}"] if finding.decided_by != "daemon" else []
    why += ["its image came late, after the board had closed"] if finding.late else []
    return f"{what}: {'; '.join(why)}." if why else f"{what}."


def _missing_in_words(missing: dict[str, Any]) -> str:
    named = missing.get("designators")
    where = f": {', '.join(named)}" if named else ""
    return f"no image of {missing['count']} × {missing['component']}{where}."
