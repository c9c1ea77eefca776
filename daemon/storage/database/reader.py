"""The results database as everybody but the writer uses it: read-only, from any thread."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Table, bindparam, func, select

from daemon.records import Published, TextRequest
from daemon.storage.database import render
from daemon.storage.database.connections import open_for_reading
from daemon.storage.database.generations import AS_SENT, as_sent
from daemon.storage.database.prepared import Question
from daemon.storage.database.schema import boards, detections, generations, inspections, stages, stream_position
from daemon.storage.database.values import Known

_STREAMS = (inspections, boards, generations)


class Reader:
    """Questions to the results database; threads may share one, each question has a connection to itself."""

    def __init__(self, url: str) -> None:
        """StoreError where there is no database at `url`."""
        self._engine = open_for_reading(url)
        table = inspections.c
        find = select(table.inspection_id, table.image_sha256).where(
            table.source == bindparam("of_source"), table.image_id == bindparam("of_image")
        )
        self._find = Question(self._engine, find)
        table = generations.c
        find = select(*AS_SENT).where(
            table.source == bindparam("of_source"), table.request_id == bindparam("of_request")
        )
        self._find_text = Question(self._engine, find)

    def close(self) -> None:
        self._engine.dispose()

    def find(self, source: str, image_id: str) -> Known | None:
        """The image that is accepted under this key, if any."""
        found = self._find.first(of_source=source, of_image=image_id)
        return Known(*found) if found is not None else None

    def find_text(self, source: str, request_id: str) -> TextRequest | None:
        """The request for text that is accepted under this key, if any."""
        found = self._find_text.first(of_source=source, of_request=request_id)
        return as_sent(found) if found is not None else None

    def open_rules(self, board_type: str, serial: str, attempt: int | None) -> str | None:
        """The rules version of the board's newest (or named) attempt while that is open; None where none is."""
        table = boards.c
        query = select(table.rules_version, table.verdict).where(table.board_type == board_type, table.serial == serial)
        if attempt is not None:
            query = query.where(table.attempt == attempt)
        with self._engine.connect() as connection:
            found = connection.execute(query.order_by(table.attempt.desc()).limit(1)).one_or_none()
        return None if found is None or found.verdict is not None else found.rules_version

    def last_seq(self) -> int:
        """The last `seq` given out; 0 before the first."""
        with self._engine.connect() as connection:
            return connection.execute(select(stream_position.c.last_seq)).scalar() or 0

    def results_since(self, seq: int, limit: int = 100) -> dict[str, Any]:
        """What `results_since` answers: `items` after `seq`, at most `limit`, each as published with its `topic`."""
        with self._engine.connect() as connection:
            # One more than asked tells whether there are more.
            found = sorted(
                (
                    message
                    for messages in (_inspections, _boards, _generations)
                    for message in messages(connection, seq, limit + 1)
                ),
                key=lambda message: message.seq,
            )
            oldest_seq = _oldest_seq(connection)
        items = [{"topic": message.topic, **message.body} for message in found[:limit]]
        return {
            "items": items,
            "last_seq": items[-1]["seq"] if items else seq,
            "more": len(found) > limit,
            "oldest_seq": oldest_seq,
        }


def _oldest_seq(connection: Connection) -> int | None:
    """The first `seq` still kept."""
    first = [connection.execute(select(func.min(table.c.seq))).scalar() for table in _STREAMS]
    return min((seq for seq in first if seq is not None), default=None)


def _after(table: Table, *columns: Any, seq: int, limit: int) -> Any:
    return select(table, *columns).where(table.c.seq > seq).order_by(table.c.seq).limit(limit)


def _inspections(connection: Connection, seq: int, limit: int) -> list[Published]:
    query = _after(inspections, boards.c.board_type, boards.c.serial, boards.c.attempt, seq=seq, limit=limit)
    found = connection.execute(query.join(boards, boards.c.board_id == inspections.c.board_id)).mappings().all()
    ids = [row["inspection_id"] for row in found]
    answers = _by_inspection(connection, stages, (stages.c.step,), ids)
    boxes = _by_inspection(connection, detections, (detections.c.detection_id,), ids)
    return [render.inspection(row, answers[row["inspection_id"]], boxes[row["inspection_id"]]) for row in found]


def _by_inspection(
    connection: Connection, table: Table, order: Sequence[Any], ids: Sequence[int]
) -> defaultdict[int, list[Any]]:
    grouped: defaultdict[int, list[Any]] = defaultdict(list)
    if ids:
        query = select(table).where(table.c.inspection_id.in_(ids)).order_by(*order)
        for row in connection.execute(query).mappings():
            grouped[row["inspection_id"]].append(row)
    return grouped


def _boards(connection: Connection, seq: int, limit: int) -> list[Published]:
    found = connection.execute(_after(boards, seq=seq, limit=limit)).mappings()
    return [render.board(row) for row in found]


def _generations(connection: Connection, seq: int, limit: int) -> list[Published]:
    found = connection.execute(_after(generations, seq=seq, limit=limit)).mappings()
    return [render.generation(row) for row in found]
