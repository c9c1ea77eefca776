"""Requests for text as rows: accepted, finished once, and read again after a restart."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, insert, select, update

from daemon.records import BoardRef, Duplicate, Generation
from daemon.storage.database.rows import Row, WrittenResults, generation_message, rounded
from daemon.storage.database.schema import boards, generations
from daemon.storage.database.transaction import Transaction
from daemon.units import monotonic_of

#: The columns of a request, in the order of `as_sent`.
AS_SENT = (
    *(generations.c.source, generations.c.request_id, generations.c.model, generations.c.prompt),
    *(generations.c.max_new_tokens, generations.c.task, generations.c.slo_ms, generations.c.deadline_ms),
    generations.c.stream,
)
_RESULT = ("reason", "mode", "text", "prompt_tokens", "new_tokens", "expert_fetches")
_WAITS = generations.c.status == "accepted"


def as_sent(row: Sequence[Any]) -> Generation:
    source, request_id, model, prompt, max_new_tokens, task, slo_ms, deadline_ms, stream = row
    return Generation(source, request_id, model, prompt, max_new_tokens, task, slo_ms, deadline_ms, stream=bool(stream))


def _sent_row(generation: Generation) -> Row:
    return {column.name: getattr(generation, column.name) for column in AS_SENT}


def accept_generations(tx: Transaction, requests: Sequence[Generation]) -> list[Generation | Duplicate]:
    return [_accept(tx, request) for request in requests]


def _accept(tx: Transaction, request: Generation) -> Generation | Duplicate:
    key = (generations.c.source == request.source) & (generations.c.request_id == request.request_id)
    earlier = tx.connection.execute(select(*AS_SENT).where(key)).one_or_none()
    if earlier is not None:
        return Duplicate(as_sent(earlier).content)
    row = _sent_row(request) | {
        "board_id": None if request.board is None else _board_id(tx.connection, request.board),
        "accepted_at": tx.at,
        "status": "accepted",
        "stream": int(request.stream),
    }
    inserted = tx.connection.execute(insert(generations).returning(generations.c.generation_id), [row])
    return replace(request, generation_id=inserted.scalar_one(), accepted_s=tx.now_s)


def _board_id(connection: Connection, board: BoardRef) -> int | None:
    query = select(boards.c.board_id).where(boards.c.board_type == board.type, boards.c.serial == board.serial)
    if board.attempt is not None:
        query = query.where(boards.c.attempt == board.attempt)
    return connection.execute(query.order_by(boards.c.attempt.desc()).limit(1)).scalar()


def finish_generations(tx: Transaction, ended: Sequence[Generation], written: WrittenResults) -> None:
    """Finish requests, each once: one that is finished already, or unknown, stays as it is."""
    for one in ended:
        is_late = one.deadline_ms is not None and (one.total_ms or 0.0) > one.deadline_ms
        end = replace(one, text=None, reason="deadline") if is_late else one
        result: Row = {
            "completed_at": tx.at,
            "status": "unknown" if end.text is None else "done",
            **{name: getattr(end, name) for name in _RESULT},
            **{name: rounded(getattr(end, name)) for name in ("ttft_ms", "tpot_ms", "total_ms")},
            **{name: rounded(getattr(end, name), 6) for name in ("predictor_hit_rate", "brownout_threshold")},
            "seq": tx.numbers.seq + 1,
        }
        waiting = update(generations).where(generations.c.generation_id == end.generation_id, _WAITS)
        if tx.connection.execute(waiting.values(result)).rowcount:
            tx.next_seq()
            written.published.append(generation_message(_sent_row(end) | result))
            written.done_texts.append((end.source, end.size_bytes))


def unfinished_generations(tx: Transaction) -> list[Generation]:
    query = select(generations.c.generation_id, generations.c.accepted_at, *AS_SENT)
    rows = tx.connection.execute(query.where(_WAITS).order_by(generations.c.generation_id))
    return [
        replace(as_sent(sent), generation_id=number, accepted_s=monotonic_of(at, tx.now_s, tx.now_wall_s))
        for number, at, *sent in rows
    ]
