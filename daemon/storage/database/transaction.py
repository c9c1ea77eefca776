"""The writer's transactions: their rows and numbers, and the memory that follows them."""

import heapq
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any

import structlog
from sqlalchemy import Connection, Engine, Table, and_, bindparam, func, insert, select, update

from daemon.storage.database.boards import Attempt, BoardAttempts, BoardCache, BoardKey
from daemon.storage.database.connections import DIALECT, Prepared
from daemon.storage.database.rows import Row
from daemon.storage.database.schema import stream_position

#: Monotonic seconds of a time limit, board type, serial, attempt.
TimeLimit = tuple[float, str, str, int]
#: Rows of one INSERT: few sizes, so that few statements are prepared; no table has so many columns that 64 rows come
#: near SQLite's 32,766 values. Up to 15 take at most two statements, each of which costs as much as ten rows.
_PART_SIZES = (64, 32, 16, *range(8, 0, -1))

_NUMBERS = Prepared(
    select(stream_position.c.last_seq, stream_position.c.last_inspection_id, stream_position.c.last_board_id)
)
_BEGIN_NUMBERS = Prepared(
    insert(stream_position).values(position_id=1, last_seq=0, last_inspection_id=0, last_board_id=0)
)
_SET_NUMBERS = Prepared(
    update(stream_position).values(
        last_seq=bindparam("seq"), last_inspection_id=bindparam("inspection_id"), last_board_id=bindparam("board_id")
    )
)


@dataclass(frozen=True, slots=True)
class Clock:
    """`wall_s` for stamps, `monotonic_s` for durations, which setting the wall clock does not change."""

    wall_s: Callable[[], float] = time.time
    monotonic_s: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class WriterMemory:
    """The database as of the last commit: `due` is a heap, `segments` counts `pending`, `numbers` may be unread."""

    numbers: "LastNumbers | None" = None
    due: list[TimeLimit] = field(default_factory=list[TimeLimit])
    #: Accepted images without a verdict, by `inspection_id`.
    waiting: set[int] = field(default_factory=set[int])
    segments: Counter[int] = field(default_factory=Counter[int])
    written_once: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])


@dataclass(slots=True)
class LastNumbers:
    """The row of `stream_position`: the last numbers given out."""

    seq: int
    inspection_id: int
    board_id: int


@dataclass(slots=True)
class Transaction:
    """Rows, numbers and changes to memory of one transaction. If it fails, it has given no numbers."""

    sql: sqlite3.Connection
    engine: Engine
    numbers: LastNumbers
    now_wall_s: float
    at: str
    now_s: float
    boards: BoardCache
    memory: WriterMemory
    touched: set[BoardKey] = field(default_factory=set[BoardKey])
    due_added: list[TimeLimit] = field(default_factory=list[TimeLimit])
    due_taken: list[TimeLimit] = field(default_factory=list[TimeLimit])
    segments: Counter[int] = field(default_factory=Counter[int])
    finished: set[int] = field(default_factory=set[int])
    checked_once: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])
    written_once: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])
    #: Serial, number of its attempts or images, source of the last image.
    suspect_serials: list[tuple[str, int, str]] = field(default_factory=list[tuple[str, int, str]])
    _connection: Connection | None = None

    @property
    def connection(self) -> Connection:
        """SQLAlchemy's view of this transaction, for all that is not on the hot path."""
        if self._connection is None:
            self._connection = self.engine.connect()
        return self._connection

    def end(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def board(self, board_type: str, serial: str) -> BoardAttempts:
        self.touched.add((board_type, serial))
        return self.boards.get(self.sql, board_type, serial)

    def attempt(self, board_type: str, serial: str, number: int) -> tuple[Attempt, Row]:
        found = self.board(board_type, serial).get(self.sql, number)
        if found is None:
            raise KeyError((board_type, serial, number))
        return found

    def next_seq(self) -> int:
        self.numbers.seq += 1
        return self.numbers.seq

    def next_inspection_id(self) -> int:
        self.numbers.inspection_id += 1
        return self.numbers.inspection_id

    def next_board_id(self) -> int:
        self.numbers.board_id += 1
        return self.numbers.board_id

    def add(self, table: Table, new: list[Row]) -> None:
        """Insert rows with equal columns, many in a statement: each step costs the interpreter's lock."""
        columns = tuple(new[0]) if new else ()
        start = 0
        for count in _PART_SIZES:
            while count <= len(new) - start:
                text, names = _insert(table, columns, count)
                part = map(itemgetter(*names), new[start : start + count])
                self.sql.execute(text, tuple(chain.from_iterable(part)))
                start += count

    def change(self, table: Table, columns: tuple[str, ...], changed: Sequence[Row]) -> None:
        """Set `columns` by primary key, one statement a row: one for many rows is slower below 16 (measured)."""
        if changed:
            text, names = _update(table, columns)
            self.sql.executemany(text, map(itemgetter(*names), changed))

    def add_once(self, table: Table, key: Row, row: Callable[[], Row | None]) -> None:
        """Insert `row()` unless `table` has `key` already: rules and experts are written at their first use."""
        token = (table.name, *map(str, key.values()))
        if token in self.memory.written_once or token in self.checked_once:
            return
        self.checked_once.add(token)
        where = and_(*(table.c[name] == value for name, value in key.items()))
        if self.connection.execute(select(func.count()).select_from(table).where(where)).scalar() == 0:
            new = row()
            if new is None:
                return
            self.connection.execute(insert(table), [new])
        self.written_once.add(token)

    @property
    def has_overdue(self) -> bool:
        return bool(self.memory.due) and self.memory.due[0][0] <= self.now_s

    def take_due(self, most: int) -> list[tuple[str, str, int]]:
        while self.has_overdue and len(self.due_taken) < most:
            self.due_taken.append(heapq.heappop(self.memory.due))
        return [(board_type, serial, attempt) for _, board_type, serial, attempt in self.due_taken]

    def adopt(self) -> None:
        """Let memory follow: the transaction is durable."""
        memory = self.memory
        memory.numbers = self.numbers
        for due in self.due_added:
            heapq.heappush(memory.due, due)
        memory.written_once |= self.written_once
        for segment, change in self.segments.items():
            memory.segments[segment] += change
            if memory.segments[segment] <= 0:
                del memory.segments[segment]
        memory.waiting -= self.finished
        self.boards.trim(self.touched)
        for serial, times, source in self.suspect_serials:
            advice = "its scanner may report this text when it reads nothing: configure it to send no image then"
            log = structlog.get_logger("database")
            log.warning("serial_repeats", serial=serial, times=times, source=source, advice=advice)

    def forget(self) -> None:
        """Undo the changes to memory: the transaction failed, and its boards are read again from the rows."""
        self.memory.numbers = None
        self.boards.forget(self.touched)
        for due in self.due_taken:
            heapq.heappush(self.memory.due, due)


def read_numbers(sql: sqlite3.Connection) -> LastNumbers:
    row = _NUMBERS(sql).fetchone()
    if row is None:
        _BEGIN_NUMBERS(sql)
        return LastNumbers(0, 0, 0)
    return LastNumbers(*row)


def set_numbers(sql: sqlite3.Connection, numbers: LastNumbers) -> None:
    _SET_NUMBERS(sql, **asdict(numbers))


@lru_cache(maxsize=256)
def _insert(table: Table, columns: tuple[str, ...], rows: int) -> tuple[str, tuple[str, ...]]:
    compiled: Any = insert(table).compile(dialect=DIALECT, column_keys=columns)
    single = str(compiled)
    return single + f", {single[single.index(' VALUES ') + 8 :]}" * (rows - 1), tuple(compiled.positiontup)


@lru_cache(maxsize=64)
def _update(table: Table, columns: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    (key,) = table.primary_key.columns
    compiled: Any = update(table).where(key == bindparam("at_key")).compile(dialect=DIALECT, column_keys=columns)
    return str(compiled), tuple(key.name if name == "at_key" else name for name in compiled.positiontup)
