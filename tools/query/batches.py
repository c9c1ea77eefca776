"""Rows in batches, each a short read transaction of its own: a question of minutes holds nothing up.

Between two batches the writer's log can be brought into the database. Rows that come meanwhile are not in the answer,
and a decision that an operator takes meanwhile may be.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, func, select

from daemon.storage.database.schema import boards
from daemon.storage.database.serials import has_serial
from tools.query.rows import Filters, NotAskedOfError, Rows, after, conditions, of_boards

BATCH_ROWS = 5000
#: So many numbers are looked through in one transaction: some tenths of a second.
WINDOW = 200_000
#: As many boards, by serial or lot, are found by their number; more are found on the way through all.
_FEW_BOARDS = 1000
#: In another order than that of `seq` everything is in memory at once.
MOST_SORTED = 100_000

Batch = Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Question:
    """`order` is `newest`, `oldest`, or a column's name, with `:desc` behind it for the largest first."""

    rows: Rows
    columns: tuple[str, ...]
    filters: Filters
    order: str = "newest"
    limit: int | None = None

    @property
    def sorted_by(self) -> str | None:
        """The column of another order than that of `seq`."""
        return None if self.order in {"newest", "oldest"} else self.order.partition(":")[0]


def check(question: Question) -> None:
    """NotAskedOfError names what these rows do not have, or what cannot be answered so."""
    conditions(question.rows, question.filters)
    named = [*question.columns, *([question.sorted_by] if question.sorted_by else [])]
    unknown = [name for name in named if name not in question.rows.columns]
    if unknown or question.order.partition(":")[2] not in {"", "asc", "desc"}:
        wrong = f"no column {', '.join(unknown)}" if unknown else f"no order {question.order}"
        raise NotAskedOfError(f"{wrong}: {question.rows.name} have {', '.join(question.rows.columns)}")
    if question.sorted_by and (question.limit is None or question.limit > MOST_SORTED):
        raise NotAskedOfError(f"--order {question.order} needs a --limit of at most {MOST_SORTED}")


def answer(engine: Engine, question: Question) -> Iterator[Batch]:
    """The rows, in the order of `columns`, in batches of at most 5000."""
    check(question)
    if question.sorted_by:
        yield from _sorted(engine, question, question.sorted_by)
        return
    left = question.limit
    for window in _windows(engine, question):
        last: Sequence[Any] | None = None
        while left is None or left > 0:
            found = _batch(engine, question, window, last, min(BATCH_ROWS, left if left is not None else BATCH_ROWS))
            if not found:
                break
            width = len(question.columns)
            yield [row[:width] for row in found]
            last = found[-1][width:]
            left = None if left is None else left - len(found)
            if len(found) < BATCH_ROWS:
                break


def count(engine: Engine, question: Question) -> int:
    """How many rows there are; the limit does not count."""
    check(question)
    rows, total = question.rows, 0
    wanted = conditions(rows, question.filters)
    for window in _windows(engine, question):
        with engine.connect() as connection:
            total += connection.execute(
                select(func.count()).select_from(rows.joined).where(*wanted, window)
            ).scalar_one()
    return total


def _batch(
    engine: Engine, question: Question, window: ColumnElement[bool], last: Sequence[Any] | None, limit: int
) -> Sequence[Sequence[Any]]:
    """At most `limit` rows behind `last`, each with its key behind its columns."""
    rows, newest_first = question.rows, question.order == "newest"
    seq, *steps = (rows.columns[name] for name in rows.key)
    query = (
        select(*(rows.columns[name].label(None) for name in (*question.columns, *rows.key)))
        .select_from(rows.joined)
        .where(*conditions(rows, question.filters), window)
        .order_by(seq.desc() if newest_first else seq.asc(), *steps)
        .limit(limit)
    )
    if last is not None:
        query = query.where(after(rows, last, newest_first=newest_first))
    with engine.connect() as connection:
        return connection.execute(query).fetchall()


def _sorted(engine: Engine, question: Question, by: str) -> Iterator[Batch]:
    rows, is_down = question.rows, question.order.endswith(":desc")
    value = rows.columns[by]
    query = (
        select(*(rows.columns[name].label(None) for name in question.columns))
        .select_from(rows.joined)
        .where(*conditions(rows, question.filters))
        # A column's nulls come last, in either direction and in every database.
        .order_by(value.is_(None), value.desc() if is_down else value.asc(), rows.columns["seq"].desc())
        .limit(question.limit)
    )
    with engine.connect() as connection:
        found = connection.execute(query).fetchall()
    for start in range(0, len(found), BATCH_ROWS):
        yield found[start : start + BATCH_ROWS]


def _windows(engine: Engine, question: Question) -> Iterator[ColumnElement[bool]]:
    """Parts of the question, each of which is looked through quickly, in the order that is asked for."""
    rows, filters = question.rows, question.filters
    seq = rows.columns["seq"]
    with engine.connect() as connection:
        # Two questions: one for both would read all numbers.
        first, last = (connection.execute(select(most(seq))).scalar() for most in (func.min, func.max))
        few = _few_boards(connection, question)
    if first is None or last is None:
        return
    first, last = max(first, filters.seq_from or first), min(last, last if filters.seq_to is None else filters.seq_to)
    if few is not None:
        yield of_boards(rows, few) & seq.between(first, last)
        return
    starts = range(first, last + 1, WINDOW)
    for start in reversed(starts) if question.order == "newest" else starts:
        yield seq.between(start, min(start + WINDOW - 1, last))


def _few_boards(connection: Connection, question: Question) -> list[int] | None:
    """The boards that serial, lot and station choose, where that is asked for and they are few."""
    equal = {
        name: question.filters.equal[name] for name in ("serial", "lot", "station") if name in question.filters.equal
    }
    if not equal:
        return None
    chosen = [has_serial(*values) if name == "serial" else boards.c[name].in_(values) for name, values in equal.items()]
    found = connection.execute(select(boards.c.board_id).where(*chosen).limit(_FEW_BOARDS + 1)).scalars().all()
    return list(found) if len(found) <= _FEW_BOARDS else None
