"""One transaction of the writer: the rows it adds, the numbers it gives, and what memory learns if it commits."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, Table, and_, bindparam, func, insert, select, update

from daemon.storage.database.boards import Board, BoardKey, Boards
from daemon.storage.database.prepared import add_rows, run
from daemon.storage.database.schema import stream_position
from daemon.storage.database.values import Clock, Memory
from daemon.units import utc_text

Row = dict[str, Any]

_NUMBERS = select(stream_position.c.last_seq, stream_position.c.last_inspection_id, stream_position.c.last_board_id)
_GIVEN = update(stream_position).values(
    last_seq=bindparam("seq"), last_inspection_id=bindparam("inspection_id"), last_board_id=bindparam("board_id")
)


@dataclass(slots=True)
class Numbers:
    """The last numbers given out; one row of `stream_position`."""

    last_seq: int
    last_inspection_id: int
    last_board_id: int


@dataclass(slots=True)
class Transaction:
    """Numbers are read with the transaction and written with it, so a failed one has given none."""

    connection: Connection
    numbers: Numbers
    now_wall_s: float
    at: str
    now_s: float
    boards: Boards
    memory: Memory
    touched: set[BoardKey] = field(default_factory=set[BoardKey])
    due_added: list[tuple[float, str, str, int]] = field(default_factory=list[tuple[float, str, str, int]])
    due_taken: list[tuple[float, str, str, int]] = field(default_factory=list[tuple[float, str, str, int]])
    segments: Counter[int] = field(default_factory=Counter[int])
    finished: list[int] = field(default_factory=list[int])
    asked_once: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])
    written_once: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])

    def board(self, board_type: str, serial: str) -> Board:
        """The board, to be changed by this transaction."""
        self.touched.add((board_type, serial))
        return self.boards.get(self.connection, board_type, serial)

    def next_seq(self) -> int:
        self.numbers.last_seq += 1
        return self.numbers.last_seq

    def next_inspection_id(self) -> int:
        self.numbers.last_inspection_id += 1
        return self.numbers.last_inspection_id

    def next_board_id(self) -> int:
        self.numbers.last_board_id += 1
        return self.numbers.last_board_id

    def add(self, table: Table, new: list[Row]) -> None:
        """Rows with the same columns each."""
        if new:
            add_rows(self.connection, table, new)

    def add_once(self, table: Table, key: Row, row: Callable[[], Row | None]) -> None:
        """Add `row()` unless `table` has `key` already: rules and experts are written at their first use."""
        token = (table.name, *map(str, key.values()))
        if token in self.memory.written_once or token in self.asked_once:
            return
        self.asked_once.add(token)
        where = and_(*(table.c[name] == value for name, value in key.items()))
        if self.connection.execute(select(func.count()).select_from(table).where(where)).scalar() == 0:
            new = row()
            if new is None:
                return
            self.connection.execute(insert(table), [new])
        self.written_once.add(token)

    def take_due(self) -> list[tuple[str, str, int]]:
        """Attempts whose time limit has passed, earliest first."""
        while self.memory.due and self.memory.due[0][0] <= self.now_s:
            self.due_taken.append(heapq.heappop(self.memory.due))
        return [key for _, *key in self.due_taken]  # type: ignore[misc]

    def adopt(self) -> None:
        """The transaction is durable: memory follows."""
        memory = self.memory
        for due in self.due_added:
            heapq.heappush(memory.due, due)
        memory.written_once |= self.written_once
        for segment, change in self.segments.items():
            memory.segments[segment] += change
            if memory.segments[segment] <= 0:
                del memory.segments[segment]
        for inspection_id in self.finished:
            memory.accepted_s.pop(inspection_id, None)
        self.boards.trim()

    def forget(self) -> None:
        """The transaction failed: what it changed in memory is read again from the rows."""
        self.boards.forget(self.touched)
        for due in self.due_taken:
            heapq.heappush(self.memory.due, due)


@contextmanager
def begin(engine: Engine, board_cache: Boards, memory: Memory, clock: Clock) -> Iterator[Transaction]:
    """Commit at the end of the block, or roll back and raise."""
    tx: Transaction | None = None
    try:
        with engine.begin() as connection:
            before = read_numbers(connection)
            numbers = Numbers(before.last_seq, before.last_inspection_id, before.last_board_id)
            now_wall_s = clock.wall_s()
            tx = Transaction(
                *(connection, numbers, now_wall_s, utc_text(now_wall_s), clock.monotonic_s(), board_cache, memory)
            )
            yield tx
            if numbers != before:
                run(
                    connection,
                    _GIVEN,
                    seq=numbers.last_seq,
                    inspection_id=numbers.last_inspection_id,
                    board_id=numbers.last_board_id,
                )
    except BaseException:
        if tx is not None:
            tx.forget()
        raise
    tx.adopt()


def read_numbers(connection: Connection) -> Numbers:
    found = run(connection, _NUMBERS).one_or_none()
    if found is None:
        connection.execute(
            insert(stream_position), [{"position_id": 1, "last_seq": 0, "last_inspection_id": 0, "last_board_id": 0}]
        )
        return Numbers(0, 0, 0)
    return Numbers(*found)
