"""Messages of a line as rows of the hub's tables, and the SQL that stores and counts each row once."""

import json
import re
from collections.abc import Sequence
from typing import Any

from daemon.consumers.protocol import Message


def new_rows(table: str) -> str:
    """Return SQL for the rows of a batch: JSON objects whose fields are the columns of `table`."""
    return f"json_populate_recordset(NULL::{table}, %(rows)s)"


def _stored(table: str) -> str:
    insert = f"INSERT INTO {table} SELECT * FROM {new_rows(table)} ON CONFLICT DO NOTHING"  # noqa: S608 - our own names
    return f"WITH stored AS ({insert} RETURNING *)"


def _add(table: str, key: str, amounts: str, select: str) -> str:
    added = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in amounts.split(", "))
    return f"INSERT INTO {table} ({key}, {amounts}) {select} ON CONFLICT ({key}) DO UPDATE SET {added}"


_VERDICTS = ", ".join(f"count(*) FILTER (WHERE verdict = '{name}')" for name in ("pass", "fail", "review", "unknown"))
_HOUR = "date_trunc('hour', at, 'UTC')"
_KEY = "hour, line, board_type"
_IMAGES = _add(
    *("yields_by_hour", _KEY, "inspected, passed, failed, review, unknown"),
    f"SELECT {_HOUR}, line, board_type, count(*), {_VERDICTS} FROM stored GROUP BY 1, 2, 3",  # noqa: S608 - our own names
)
_DEFECTS = _add(
    *("defects_by_hour", f"{_KEY}, component, defect", "count"),
    f"SELECT {_HOUR}, line, board_type, component, coalesce(defect, ''), count(*)"  # noqa: S608
    " FROM stored WHERE verdict = 'fail' GROUP BY 1, 2, 3, 4, 5",
)
_BOARDS = _add(
    *("yields_by_hour", _KEY),
    "boards, boards_passed, boards_failed, boards_review, boards_unknown, first_boards, first_passed,"
    " first_final_passed",
    f"SELECT {_HOUR}, line, board_type, count(*), {_VERDICTS}, count(*) FILTER (WHERE attempt = 1),"  # noqa: S608
    " count(*) FILTER (WHERE attempt = 1 AND verdict = 'pass'),"
    " count(*) FILTER (WHERE attempt = 1 AND final_verdict = 'pass') FROM stored GROUP BY 1, 2, 3",
)

#: Statements that one batch runs for the rows of each table.
STORE: dict[str, tuple[str, ...]] = {
    "inspections": (f"{_stored('inspections')}, counted AS ({_IMAGES}) {_DEFECTS}",),
    "boards": (f"{_stored('boards')} {_BOARDS}",),
    "reviews": (
        f"""
        INSERT INTO reviews SELECT filled.* FROM {new_rows("reviews")} AS new LEFT JOIN LATERAL (
            SELECT verdict AS verdict_by_line, expert, expert_version FROM inspections
            WHERE inspections.line = new.line AND inspections.inspection_id = new.inspection_id
              AND inspections.board_serial = new.board_serial
            ORDER BY inspections.at DESC LIMIT 1
        ) AS image ON true, jsonb_populate_record(new, to_jsonb(image)) AS filled
        ON CONFLICT DO NOTHING
        """,  # noqa: S608
        # Only the newest decision of the batch about each attempt counts; its effect belongs to the hour of the board.
        f"""
        WITH newest AS (
            SELECT DISTINCT ON (line, board_type, board_serial, attempt) * FROM {new_rows("reviews")}
            WHERE board_verdict IS NOT NULL ORDER BY line, board_type, board_serial, attempt, seq DESC
        ), old AS (
            SELECT board.*, newest.board_verdict AS after FROM newest CROSS JOIN LATERAL (
                SELECT line, epoch, seq, at, board_type, attempt, final_verdict FROM boards
                WHERE boards.line = newest.line AND boards.board_serial = newest.board_serial
                  AND boards.board_type = newest.board_type AND boards.attempt = newest.attempt
                ORDER BY at DESC LIMIT 1
            ) AS board
        ), changed AS (
            UPDATE boards SET final_verdict = old.after FROM old
            WHERE (boards.line, boards.epoch, boards.seq) = (old.line, old.epoch, old.seq)
        )
        UPDATE yields_by_hour AS yields SET first_final_passed = first_final_passed + difference.boards
        FROM (
            SELECT line, {_HOUR} AS hour, board_type,
                   sum((after = 'pass')::int - (final_verdict = 'pass')::int) AS boards
            FROM old WHERE attempt = 1 GROUP BY 1, 2, 3
        ) AS difference
        WHERE (yields.line, yields.hour, yields.board_type)
            = (difference.line, difference.hour, difference.board_type)
        """,  # noqa: S608
    ),
}
_TABLES = {"inspection": "inspections", "board": "boards", "review": "reviews"}
_encode = json.JSONEncoder(ensure_ascii=False).encode


def rows_of(messages: Sequence[Message], line: str, epoch: str) -> dict[str, str]:
    rows: dict[str, list[Message]] = {}
    for message in messages:
        kind = message["topic"].partition("/")[0]
        if kind in _TABLES:
            rows.setdefault(_TABLES[kind], []).append({**_row(kind, message), "line": line, "epoch": epoch})
    return {table: _storable(_encode(rows[table])) for table in _TABLES.values() if table in rows}


def _row(kind: str, message: Message) -> dict[str, Any]:
    """Return the fields of a message that have a column, under the column's name."""
    board = message["board"]
    row = message | {"board_type": board["type"], "board_serial": board["serial"], "attempt": board["attempt"]}
    if kind != "review":
        row |= {"lot": board.get("lot"), "station": board.get("station")}
    if kind == "board":
        row["final_verdict"] = message["verdict"]
    if kind == "inspection":
        names = ("expert", "version", "label", "confidence")
        stages = [{name: stage[name] for name in names} for stage in message["stages"]]
        last = stages[-1] if stages else {}
        row |= {**last, "stages": stages, "image_id": message["id"], "expert_version": last.get("version")}
    return row


def _storable(text: str) -> str:
    """Replace U+0000, which PostgreSQL's texts cannot hold, by U+FFFD."""
    return re.sub(r"(\\\\)|\\u0000", lambda match: match[1] or "\ufffd", text) if "\\u0000" in text else text
