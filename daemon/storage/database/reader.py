"""Read-only queries of the running line, from any thread: catching up, duplicates, rules of open boards."""

import sqlite3
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from sqlalchemy import Connection, Table, func, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import PoolProxiedConnection

from daemon.records import Generation, Message
from daemon.storage.database.connections import open_for_reading
from daemon.storage.database.generations import AS_SENT, as_sent
from daemon.storage.database.reviews import messages_after, withdrawn_releases
from daemon.storage.database.rows import board_message, board_of, generation_message, inspection_message
from daemon.storage.database.schema import (
    boards,
    detections,
    editions,
    generations,
    inspections,
    pending,
    reviews,
    rules_versions,
    stages,
    stream_position,
)
from routing_rules.defects import MAX_VERSIONS, defect_labels

_FIND_IMAGE = "SELECT image_sha256 FROM inspections WHERE source = ? AND image_id = ?"


class ResultsReader:
    """Reads the results database; threads may share one, each query has a connection to itself."""

    def __init__(self, url: str) -> None:
        self._engine = open_for_reading(url)
        self._lock = threading.Lock()
        self._held: PoolProxiedConnection | None = None

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
        self._engine.dispose()

    def find(self, source: str, image_id: str) -> str | None:
        """Return the sha256 of an accepted image. Every arrival asks, so it has its own connection, without SQLAlchemy.

        The pool's work would take longer than the query. Nothing is left open: SQLite commits by itself.
        """
        try:
            with self._lock:
                self._held = self._held or self._engine.raw_connection()
                with closing(self._held.cursor()) as cursor:
                    cursor.execute(_FIND_IMAGE, (source, image_id))
                    row = cursor.fetchone()
        except sqlite3.Error as error:
            raise OperationalError(_FIND_IMAGE, (source, image_id), error) from error
        return row[0] if row is not None else None

    def find_text(self, source: str, request_id: str) -> Generation | None:
        table = generations.c
        query = select(*AS_SENT).where(table.source == source, table.request_id == request_id)
        with self._engine.connect() as connection:
            row = connection.execute(query).first()
        return as_sent(row) if row is not None else None

    def kept_copy(self, inspection_id: int) -> tuple[str | None, bool]:
        table = inspections.c
        query = select(table.image_path, pending.c.task).outerjoin_from(
            inspections, pending, pending.c.inspection_id == table.inspection_id
        )
        with self._engine.connect() as connection:
            row = connection.execute(query.where(table.inspection_id == inspection_id)).first()
        return (None, False) if row is None else (row.image_path, row.task is not None)

    def open_edition(self, board_type: str, serial: str, attempt: int | None) -> int | None:
        table = boards.c
        query = select(table.edition, table.verdict).where(table.board_type == board_type, table.serial == serial)
        if attempt is not None:
            query = query.where(table.attempt == attempt)
        with self._engine.connect() as connection:
            row = connection.execute(query.order_by(table.attempt.desc()).limit(1)).one_or_none()
        return None if row is None or row.verdict is not None else row.edition

    def highest_edition(self) -> int:
        """Return the highest number of an edition that any row names, 0 without one."""
        with self._engine.connect() as connection:
            return connection.execute(select(func.max(editions.c.edition))).scalar() or 0

    def edition_digest(self, number: int) -> str | None:
        with self._engine.connect() as connection:
            return connection.execute(select(editions.c.sha256).where(editions.c.edition == number)).scalar()

    def withdrawn_releases(self, limit: int) -> list[dict[str, Any]]:
        with self._engine.connect() as connection:
            rows = connection.execute(withdrawn_releases(limit)).mappings()
            return [{**row, "board": board_of(row)} for row in rows]

    def defects(self) -> dict[str, str]:
        with self._engine.connect() as connection:
            return read_defect_labels(connection)

    def last_seq(self) -> int:
        return self.end()[0]

    def end(self) -> tuple[int, str | None]:
        """Return the last `seq` given out, and the epoch that it belongs to: another one has numbers of its own."""
        with self._engine.connect() as connection:
            row = connection.execute(select(stream_position.c.last_seq, stream_position.c.epoch)).first()
        return (0, None) if row is None else (row.last_seq, row.epoch)

    def results_since(self, seq: int, limit: int = 100) -> dict[str, Any]:
        """Answer `results_since`: `items` after `seq`, at most `limit`, each as published with its `topic`."""
        with self._engine.connect() as connection:
            # One more than the limit tells whether there are more.
            rest = (seq, limit + 1)
            messages = [
                *_inspections(connection, *rest),
                *map(board_message, _rows_after(connection, select(boards), boards, *rest)),
                *map(generation_message, _rows_after(connection, select(generations), generations, *rest)),
                *messages_after(connection, *rest),
            ]
            tables = (inspections, boards, generations, reviews)
            first = [connection.execute(select(func.min(table.c.seq))).scalar() for table in tables]
        messages.sort(key=lambda message: message.seq)
        items = [{"topic": message.topic, **message.body} for message in messages[:limit]]
        return {
            "items": items,
            "last_seq": items[-1]["seq"] if items else seq,
            "more": len(messages) > limit,
            "oldest_seq": min((seq for seq in first if seq is not None), default=None),
        }

    def at(self, seq: int) -> str | None:
        items = self.results_since(seq - 1, 1)["items"]
        return items[0]["at"] if items and items[0]["seq"] == seq else None

    def before_oldest(self) -> int:
        oldest = self.results_since(0, 1)["oldest_seq"]
        return self.last_seq() if oldest is None else oldest - 1

    def board_states(self, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the closed board with its `final_verdict` for each of `items` that reviews its newest attempt."""
        closed = boards.c.verdict.is_not(None)
        states: list[dict[str, Any]] = []
        with self._engine.connect() as connection:
            for review in items:
                if not review["topic"].startswith("review/") or review["board_verdict"] is None:
                    continue
                board = review["board"]
                attempts = select(boards).where(
                    boards.c.board_type == board["type"], boards.c.serial == board["serial"]
                )
                newest = attempts.where(closed).order_by(boards.c.attempt.desc()).limit(1)
                row = connection.execute(newest).mappings().one_or_none()
                if row is not None and row["attempt"] == board["attempt"]:
                    message = board_message(row)
                    changed = {"seq": review["seq"], "at": review["at"], "final_verdict": review["board_verdict"]}
                    states.append({"topic": message.topic, **message.body, **changed})
        return states


def read_defect_labels(connection: Connection) -> dict[str, str]:
    newest = select(rules_versions.c.text).order_by(rules_versions.c.loaded_at.desc()).limit(MAX_VERSIONS)
    return defect_labels(connection.execute(newest).scalars())


def _rows_after(connection: Connection, query: Any, table: Table, seq: int, limit: int) -> Sequence[Any]:
    return connection.execute(query.where(table.c.seq > seq).order_by(table.c.seq).limit(limit)).mappings().all()


def _inspections(connection: Connection, seq: int, limit: int) -> list[Message]:
    query = select(inspections, boards.c.board_type, boards.c.serial, boards.c.attempt)
    query = query.join(boards, boards.c.board_id == inspections.c.board_id)
    rows = _rows_after(connection, query, inspections, seq, limit)
    ids = [row["inspection_id"] for row in rows]
    answers, boxes = by_inspection(connection, stages, ids), by_inspection(connection, detections, ids)
    return [inspection_message(row, answers[row["inspection_id"]], boxes[row["inspection_id"]]) for row in rows]


def by_inspection(connection: Connection, table: Table, ids: Sequence[int]) -> defaultdict[int, list[Any]]:
    grouped: defaultdict[int, list[Any]] = defaultdict(list)
    if ids:
        query = select(table).where(table.c.inspection_id.in_(ids)).order_by(*table.primary_key.columns)
        for row in connection.execute(query).mappings():
            grouped[row["inspection_id"]].append(row)
    return grouped
