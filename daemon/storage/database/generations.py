"""Requests for text as rows: accepted, finished once, and read again after a restart."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, insert, select, update

from daemon.records import AcceptedText, BoardRef, TextOutcome, TextRequest
from daemon.storage.database.rows import WrittenResults, generation_message, rounded
from daemon.storage.database.schema import boards, generations
from daemon.storage.database.transaction import Transaction
from daemon.units import wall_seconds

#: The columns of a request, in the order of `as_sent`.
AS_SENT = (
    *(generations.c.source, generations.c.request_id, generations.c.model, generations.c.prompt),
    *(generations.c.max_new_tokens, generations.c.task, generations.c.slo_ms, generations.c.deadline_ms),
    generations.c.stream,
)
_RESULT = ("reason", "mode", "text", "prompt_tokens", "new_tokens", "expert_fetches")
_WAITS = generations.c.status == "accepted"


def as_sent(row: Sequence[Any]) -> TextRequest:
    source, request_id, model, prompt, max_new_tokens, task, slo_ms, deadline_ms, stream = row
    return TextRequest(
        source, request_id, model, prompt, max_new_tokens, task, slo_ms, deadline_ms, None, stream=bool(stream)
    )


def accept_texts(tx: Transaction, requests: Sequence[TextRequest]) -> list[AcceptedText | TextRequest]:
    """Add a row for each request; return the earlier request in place of one whose key is taken."""
    return [_accept(tx, request) for request in requests]


def _accept(tx: Transaction, request: TextRequest) -> AcceptedText | TextRequest:
    key = (generations.c.source == request.source) & (generations.c.request_id == request.request_id)
    earlier = tx.connection.execute(select(*AS_SENT).where(key)).one_or_none()
    if earlier is not None:
        return as_sent(earlier)
    row = {column.name: getattr(request, column.name) for column in AS_SENT} | {
        "board_id": None if request.board is None else _board_id(tx.connection, request.board),
        "accepted_at": tx.at,
        "status": "accepted",
        "stream": int(request.stream),
    }
    inserted = tx.connection.execute(insert(generations).returning(generations.c.generation_id), [row])
    return AcceptedText(inserted.scalar_one(), request, tx.now_wall_s, tx.now_s)


def _board_id(connection: Connection, board: BoardRef) -> int | None:
    query = select(boards.c.board_id).where(boards.c.board_type == board.type, boards.c.serial == board.serial)
    if board.attempt is not None:
        query = query.where(boards.c.attempt == board.attempt)
    return connection.execute(query.order_by(boards.c.attempt.desc()).limit(1)).scalar()


def finish_texts(tx: Transaction, outcomes: Sequence[TextOutcome]) -> WrittenResults:
    written = WrittenResults()
    for outcome in outcomes:
        at = generations.c.generation_id == outcome.generation_id
        row = tx.connection.execute(select(generations).where(at, _WAITS)).mappings().one_or_none()
        if row is None:
            continue
        if row["deadline_ms"] is not None and (outcome.total_ms or 0.0) > row["deadline_ms"]:
            outcome = replace(outcome, text=None, reason="deadline")  # noqa: PLW2901 - the outcome that counts
        result: dict[str, Any] = {
            "completed_at": tx.at,
            "status": "unknown" if outcome.text is None else "done",
            **{name: getattr(outcome, name) for name in _RESULT},
            **{name: rounded(getattr(outcome, name)) for name in ("ttft_ms", "tpot_ms", "total_ms")},
            **{name: rounded(getattr(outcome, name), 6) for name in ("predictor_hit_rate", "brownout_threshold")},
            "seq": tx.next_seq(),
        }
        tx.connection.execute(update(generations).where(at).values(result))
        written.published.append(generation_message({**row, **result}))
        written.done.append((row["source"], len(row["prompt"].encode())))
    return written


def unfinished_texts(tx: Transaction) -> list[AcceptedText]:
    query = select(generations.c.generation_id, generations.c.accepted_at, *AS_SENT)
    rows = tx.connection.execute(query.where(_WAITS).order_by(generations.c.generation_id))
    return [AcceptedText(number, as_sent(sent), wall_seconds(at)) for number, at, *sent in rows]
