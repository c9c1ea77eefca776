"""Verdicts into rows and messages, each with its `seq`, and the boards that close behind them."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Select, Table, bindparam, delete, select, update

from daemon.records import ExpertVersion, Outcome
from daemon.storage.database import render, rows
from daemon.storage.database.attempts import Attempt, Reason
from daemon.storage.database.schema import boards, detections, expert_versions, inspections, pending, stages
from daemon.storage.database.transaction import Transaction
from daemon.storage.database.values import CopyRequest, Kept, Written
from daemon.units import wall_seconds
from routing_rules.routes import Verdict

Row = dict[str, Any]
VersionOf = Callable[[str, str], ExpertVersion | None]

#: Far below what SQLite (32,766) and others take as variables of one statement.
_IDS_PER_QUERY = 500
_RESULT = ("status", "completed_at", "verdict", "defect", "reason", "late", "latency_ms", "seq")
_CLOSING = ("completed_at", "inspected", "verdict", "reason", "seq", "failed", "missing")


class Finishing:
    """One transaction's results, collected row by row and written table by table."""

    def __init__(self, tx: Transaction, keep: frozenset[Verdict], version_of: VersionOf) -> None:
        self._tx = tx
        self._keep = keep
        self._version_of = version_of
        self._inspections: list[Row] = []
        self._boards: dict[int, tuple[Attempt, Row]] = {}
        self._stages: list[Row] = []
        self._detections: list[Row] = []
        self._to_keep: list[int] = []
        self._to_drop: list[int] = []
        self.written = Written()

    def judge(self, outcomes: Sequence[Outcome]) -> None:
        """Finish images. One that is finished already, or that nobody knows, stays as it is: once is enough."""
        waiting = {
            row["inspection_id"]: row
            for ids in _chunks([outcome.inspection_id for outcome in outcomes])
            for row in map(dict, self._tx.connection.execute(waiting_for("judge", ids)).mappings())
        }
        for outcome in outcomes:
            row = waiting.pop(outcome.inspection_id, None)
            if row is not None:
                self._finish(row, outcome)

    def close_due(self) -> None:
        """Close the attempts whose time limit has passed."""
        for board_type, serial, number in self._tx.take_due():
            board = self._tx.board(board_type, serial)
            attempt = board.attempts.get(number)
            if attempt is not None and not attempt.closed:
                self._close(attempt, board.rows[number], "time_limit")

    def note_kept(self, copies: Iterable[Kept]) -> None:
        """Copies in `images/` are durable: the journal's bytes may go."""
        paths = {copy.inspection_id: copy.image_path for copy in copies}
        for ids in _chunks(list(paths)):
            found = self._tx.connection.execute(select(pending).where(pending.c.inspection_id.in_(ids))).mappings()
            for row in found:
                self._drop(dict(row))
        _update(
            self._tx, inspections, [{"inspection_id": key, "image_path": path} for key, path in paths.items() if path]
        )

    def flush(self) -> None:
        """Write what was collected."""
        tx = self._tx
        _update(
            tx, inspections, [{name: row[name] for name in ("inspection_id", *_RESULT)} for row in self._inspections]
        )
        tx.add(stages, self._stages)
        tx.add(detections, self._detections)
        for attempt, row in self._boards.values():
            row["inspected"] = row["inspected"] if attempt.closed else attempt.inspected
        _update(tx, boards, [{name: row[name] for name in ("board_id", *_CLOSING)} for _, row in self._boards.values()])
        for ids in _chunks(self._to_keep):
            tx.connection.execute(update(pending).where(pending.c.inspection_id.in_(ids)).values(task="keep"))
        for ids in _chunks(self._to_drop):
            tx.connection.execute(delete(pending).where(pending.c.inspection_id.in_(ids)))

    def _finish(self, row: Row, outcome: Outcome) -> None:
        tx = self._tx
        board = tx.board(row["board_type"], row["serial"])
        attempt, board_row = board.attempts[row["attempt"]], board.rows[row["attempt"]]
        latency_ms = self._latency_ms(row)
        if outcome.reason is None and row["deadline_ms"] is not None and latency_ms > row["deadline_ms"]:
            # Judged in time, but durable too late, so heard too late.
            outcome = replace(outcome, verdict="unknown", defect=None, reason="deadline")
        attempt.judge(outcome.inspection_id, row["component"], row["designator"], outcome.verdict, outcome.defect)
        row |= {
            "status": "done",
            "completed_at": self._tx.at,
            "verdict": outcome.verdict,
            "defect": outcome.defect,
            "reason": outcome.reason,
            # Judged after its board's closing, even if accepted before: the board's verdict does not contain it.
            "late": int(bool(row["late"]) or attempt.closed),
            "latency_ms": latency_ms,
            "seq": tx.next_seq(),
        }
        stage_rows, box_rows = rows.stage_rows(outcome), rows.detection_rows(outcome)
        self._inspections.append(row)
        self._stages += stage_rows
        self._detections += box_rows
        self.written.published.append(render.inspection(row, stage_rows, box_rows))
        self.written.done.append((row["source"], row["image_bytes"]))
        tx.finished.append(outcome.inspection_id)
        for stage in stage_rows:
            self._note_expert(stage["expert"], stage["expert_version"])
        self._settle_bytes(row)
        if not attempt.closed:
            self._boards[attempt.board_id] = (attempt, board_row)
            if attempt.is_complete:
                self._close(attempt, board_row, "complete")

    def _settle_bytes(self, row: Row) -> None:
        """The image's bytes stay in the journal until they are copied, or may go."""
        if row["verdict"] in self._keep:
            self._to_keep.append(row["inspection_id"])
            self.written.keep.append(keep_task(row))
        else:
            self._drop(row)

    def _drop(self, waiting: Row) -> None:
        self._to_drop.append(waiting["inspection_id"])
        self._tx.segments[waiting["segment"]] -= 1
        self.written.freed_journal = True

    def _close(self, attempt: Attempt, row: Row, reason: Reason) -> None:
        closing = attempt.closing(reason)
        attempt.closed = True
        row |= {
            "completed_at": self._tx.at,
            "inspected": closing.inspected,
            "verdict": closing.verdict,
            "reason": closing.reason,
            "seq": self._tx.next_seq(),
            "failed": json.dumps(closing.failed, ensure_ascii=False),
            "missing": json.dumps(closing.missing, ensure_ascii=False),
        }
        self._boards[attempt.board_id] = (attempt, row)
        self.written.published.append(render.board(row))

    def _latency_ms(self, row: Row) -> float:
        """From acceptance to verdict; by the wall clock only where a restart lies between."""
        accepted_s = self._tx.memory.accepted_s.get(row["inspection_id"])
        if accepted_s is not None:
            return round((self._tx.now_s - accepted_s) * 1000, 3)
        return round(max(0.0, self._tx.now_wall_s - wall_seconds(row["accepted_at"])) * 1000, 3)

    def _note_expert(self, expert: str, version: str) -> None:
        def row() -> Row | None:
            found = self._version_of(expert, version)
            return rows.expert_version_row(found, self._tx.at) if found is not None else None

        self._tx.add_once(expert_versions, {"expert": expert, "expert_version": version}, row)


def waiting_for(task: str, ids: Sequence[int] | None = None) -> Select[Any]:
    """Images whose bytes are in the journal, with their board and where the bytes are; oldest first."""
    query = (
        select(
            inspections,
            *(boards.c.board_type, boards.c.serial, boards.c.attempt),
            *(column for column in pending.c if column.name != "inspection_id"),
        )
        .join(boards, boards.c.board_id == inspections.c.board_id)
        .join(pending, pending.c.inspection_id == inspections.c.inspection_id)
        .where(pending.c.task == task)
        .order_by(inspections.c.inspection_id)
    )
    return query if ids is None else query.where(inspections.c.inspection_id.in_(ids))


def keep_task(row: Row) -> CopyRequest:
    return CopyRequest(row["inspection_id"], rows.journal_key(row), rows.pixels(row), row["completed_at"])


def _update(tx: Transaction, table: Table, changed: Sequence[Row]) -> None:
    """One statement for all rows; the first name in each is the table's key."""
    if not changed:
        return
    key, *names = changed[0]
    statement = update(table).where(table.c[key] == bindparam(f"at_{key}"))
    statement = statement.values({name: bindparam(f"new_{name}") for name in names})
    tx.connection.execute(
        statement, [{f"at_{key}": row[key]} | {f"new_{name}": row[name] for name in names} for row in changed]
    )


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), _IDS_PER_QUERY):
        yield ids[start : start + _IDS_PER_QUERY]
