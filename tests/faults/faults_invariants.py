"""The promises that a line's files keep after any crash, checked without a running daemon.

The rules are read out of PROTOCOL.md and RESULTS.md once more, in other words than the daemon's own.
"""

import hashlib
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from daemon.records import JournalKey
from daemon.storage.journal import Journal, JournalError
from tests.faults.faults_cameras import BOARDS, VERDICTS, Sent

ARCHIVED = {"fail", "review", "unknown"}
_WORST = ("pass", "review", "unknown", "fail")
Account = Mapping[tuple[str, str], Sent]


def broken_promises(
    folder: Path, taken: Account, messages: Mapping[int, Mapping[str, Any]], *, idle: bool
) -> list[str]:
    """Return every promise that the line in `folder` does not keep; the daemon must not be running.

    `taken`: the images that publishers may forget. `messages`: messages of the results stream by `seq`. `idle`: the
    backlog was finished before the daemon ended.
    """
    with tempfile.TemporaryDirectory() as copy:
        for name in ("inspection.db", "inspection.db-wal", "inspection.db-journal"):
            if (folder / name).exists():
                shutil.copy(folder / name, copy)
        with closing(sqlite3.connect(Path(copy) / "inspection.db")) as database:
            database.row_factory = sqlite3.Row
            if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'stream_position'").fetchone():
                return [f"{len(taken)} images were accepted and there is no database"] if taken or messages else []
            return [
                *_database(database),
                *_numbers(database),
                *_images(database, folder, taken, idle=idle),
                *_stream(database, messages),
                *_boards(database),
            ]


def _database(database: sqlite3.Connection) -> Iterator[str]:
    for (problem,) in database.execute("PRAGMA integrity_check"):
        if problem != "ok":
            yield f"integrity_check: {problem}"
    for row in database.execute("PRAGMA foreign_key_check"):
        yield f"foreign_key_check: {tuple(row)}"
    if database.execute("PRAGMA auto_vacuum").fetchone()[0] != 2:
        yield "auto_vacuum is not incremental: the file can never shrink"


def _numbers(database: sqlite3.Connection) -> Iterator[str]:
    query = """SELECT seq FROM (SELECT seq FROM inspections UNION ALL SELECT seq FROM boards
    UNION ALL SELECT seq FROM generations) WHERE seq IS NOT NULL ORDER BY seq"""
    numbers = [number for (number,) in database.execute(query)]
    last = database.execute("SELECT last_seq FROM stream_position").fetchone()
    if numbers != list(range(1, (last[0] if last else 0) + 1)):
        repeats = [number for number, times in Counter(numbers).items() if times > 1]
        gaps = sorted(set(range(1, (last[0] if last else 0) + 1)) - set(numbers))
        yield f"seq up to {last and last[0]}: repeats {repeats[:5]}, gaps {gaps[:5]}, {len(numbers)} numbers"


def _images(database: sqlite3.Connection, folder: Path, taken: Account, *, idle: bool) -> Iterator[str]:
    rows = {(row["source"], row["image_id"]): row for row in database.execute("SELECT * FROM inspections")}
    waiting = {row["inspection_id"]: row for row in database.execute("SELECT * FROM pending")}
    journal = Journal(folder / "journal")
    try:
        for key, sent in taken.items():
            if key not in rows:
                yield f"{key}: accepted, and its row is lost"
            elif rows[key]["image_sha256"] != sent.sha256:
                yield f"{key}: its row is of another image"
        for key, row in rows.items():
            task = waiting.pop(row["inspection_id"], None)
            yield from (f"{key}: {problem}" for problem in _image(row, task, folder, journal, idle=idle))
        for inspection_id in waiting:
            yield f"bytes wait in the journal for inspection {inspection_id}, which is not there"
    finally:
        journal.close()


def _image(row: sqlite3.Row, task: sqlite3.Row | None, folder: Path, journal: Journal, *, idle: bool) -> Iterator[str]:
    state = f"status {row['status']}, verdict {row['verdict']}, reason {row['reason']}, seq {row['seq']}"
    waits_for = None if task is None else task["task"]
    if row["status"] == "done":
        if row["verdict"] != VERDICTS[row["component"]] or row["reason"] is not None or row["seq"] is None:
            yield state
        if waits_for == "judge":
            yield f"it would be judged again: {state}"
        if row["verdict"] in ARCHIVED and task is None:
            yield from _copy(row, folder)
    else:
        if idle or row["verdict"] is not None or row["seq"] is not None:
            yield state
        if waits_for != "judge":
            yield "it waits for its verdict and has no bytes"
    if task is not None:
        yield from _bytes(row, task, journal)


def _copy(row: sqlite3.Row, folder: Path) -> Iterator[str]:
    if row["image_path"] is None or not (folder / row["image_path"]).exists():
        yield f"its bytes are gone: {row['image_path']}"
    elif hashlib.sha256((folder / row["image_path"]).read_bytes()).hexdigest() != row["image_sha256"]:
        yield f"its copy is damaged: {row['image_path']}"


def _bytes(row: sqlite3.Row, task: sqlite3.Row, journal: Journal) -> Iterator[str]:
    try:
        payload = journal.read(JournalKey(task["segment"], task["offset"], task["length"]))
    except JournalError as error:
        yield f"its bytes are gone: {error}"
        return
    if hashlib.sha256(payload).hexdigest() != row["image_sha256"]:
        yield "the journal has the bytes of another image for it"


def _stream(database: sqlite3.Connection, messages: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    query = """SELECT seq, source || ' ' || image_id AS name, verdict FROM inspections WHERE seq IS NOT NULL UNION ALL
    SELECT seq, board_type || ' ' || serial || ' ' || attempt, verdict FROM boards WHERE seq IS NOT NULL"""
    stored = {seq: (name, verdict) for seq, name, verdict in database.execute(query)}
    for seq, message in messages.items():
        if message["topic"].startswith("inspection/"):
            name = f"{message['source']} {message['id']}"
        else:
            name = f"{message['board']['type']} {message['board']['serial']} {message['board']['attempt']}"
        if stored.get(seq) != (name, message["verdict"]):
            yield f"seq {seq} was published as {name} {message['verdict']} and is stored as {stored.get(seq)}"


def _boards(database: sqlite3.Connection) -> Iterator[str]:
    images: dict[int, list[sqlite3.Row]] = {}
    for row in database.execute("SELECT * FROM inspections"):
        images.setdefault(row["board_id"], []).append(row)
    for board in database.execute("SELECT * FROM boards"):
        name = f"board {board['board_type']} {board['serial']} {board['attempt']}"
        closed = board["verdict"] is not None
        counted = [
            row
            for row in images.get(board["board_id"], [])
            if row["seq"] is not None and not row["late"] and (not closed or row["seq"] < board["seq"])
        ]
        missing = set(BOARDS[board["board_type"]]) - {row["designator"] for row in counted}
        if not closed:
            # The one that completes it closes it, in the same transaction.
            if not missing and all(row["status"] == "done" for row in images[board["board_id"]]):
                yield f"{name}: every part has its verdict and it is open"
            continue
        right = max((row["verdict"] for row in counted), key=_WORST.index, default="unknown")
        if missing:
            right = max(right, "unknown", key=_WORST.index)
        if board["verdict"] != right or board["inspected"] != len(BOARDS[board["board_type"]]) - len(missing):
            yield f"{name}: verdict {board['verdict']} ({board['inspected']} inspected), and {right} is right"
        if board["reason"] != ("time_limit" if missing else "complete"):
            yield f"{name}: closed for {board['reason']}, missing {sorted(missing)}"
