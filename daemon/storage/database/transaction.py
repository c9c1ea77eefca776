"""The writer's transactions, and the statements of the hot path.

These statements are compiled once and then handed to SQLite's driver as text. SQLAlchemy's own way costs 60 µs a query
and 5 µs a row more (measured), most of it under the interpreter's lock; even its way to the driver costs 20 µs.
"""

import heapq
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

import structlog
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Executable,
    Table,
    and_,
    bindparam,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError

from daemon.storage.database.boards import Attempt, BoardAttempts, BoardCache, BoardKey
from daemon.storage.database.rows import Row
from daemon.storage.database.schema import stream_position
from daemon.units import utc_text

T = TypeVar("T")
#: Monotonic seconds of a time limit, board type, serial, attempt.
TimeLimit = tuple[float, str, str, int]

#: Rows of one INSERT: few sizes, so that few statements are prepared; no table has so many columns that 64 rows come
#: near SQLite's 32,766 values. Up to 15 take at most two statements, each of which costs as much as ten rows.
_PART_SIZES = (64, 32, 16, *range(8, 0, -1))
_NUMBERS = select(stream_position.c.last_seq, stream_position.c.last_inspection_id, stream_position.c.last_board_id)
_SET_NUMBERS = update(stream_position).values(
    last_seq=bindparam("seq"), last_inspection_id=bindparam("inspection_id"), last_board_id=bindparam("board_id")
)


def run_prepared(connection: Connection, statement: Executable, **values: Any) -> sqlite3.Cursor:
    """Execute `statement`, one object for all calls, with its named parameters."""
    sql, values_of = _prepare(connection.dialect, statement)
    return _execute(connection, sql, values_of(values))


def among(column: ColumnElement[int]) -> ColumnElement[bool]:
    """Return the condition that `column` is in the parameter `ids`, a JSON list: one statement for any number."""
    return column.in_(select(func.json_each(bindparam("ids")).table_valued("value").c.value))


def add_rows(connection: Connection, table: Table, new: Sequence[Row]) -> None:
    """Insert rows with equal columns, many in a statement: each step costs the interpreter's lock."""
    dialect, columns = connection.dialect, tuple(new[0])
    start = 0
    while start < len(new):
        count = next(size for size in _PART_SIZES if size <= len(new) - start)
        sql, names = _insert(dialect, table, columns, count)
        part = map(itemgetter(*names), new[start : start + count])
        _execute(connection, sql, tuple(chain.from_iterable(part)))
        start += count


def update_rows(connection: Connection, table: Table, columns: tuple[str, ...], changed: Sequence[Row]) -> None:
    """Set `columns` by primary key, one statement a row: one for many rows is slower below 16 (measured)."""
    if not changed:
        return
    sql, names = _update(connection.dialect, table, columns)
    with _sqlite_driver(connection, sql) as driver:
        driver.executemany(sql, map(itemgetter(*names), changed))


def _execute(connection: Connection, sql: str, parameters: Any) -> sqlite3.Cursor:
    with _sqlite_driver(connection, sql) as driver:
        return driver.execute(sql, parameters)


@contextmanager
def _sqlite_driver(connection: Connection, sql: str) -> Iterator[sqlite3.Connection]:
    """Yield the driver's connection, whose statements cost 20 µs less; its errors become SQLAlchemy's."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    try:
        yield driver
    except sqlite3.Error as error:
        raise DBAPIError.instance(sql, None, error, sqlite3.Error) from error


@lru_cache(maxsize=256)
def _prepare(dialect: Dialect, statement: Executable) -> tuple[str, Callable[[Row], Any]]:
    compiled: Any = statement.compile(dialect=dialect)  # type: ignore[attr-defined]  # every statement has it
    names: Sequence[str] = compiled.positiontup
    fixed: Row = compiled.params  # literal values of the statement itself
    return str(compiled), lambda values: tuple(values[name] if name in values else fixed[name] for name in names)


@lru_cache(maxsize=256)
def _insert(dialect: Dialect, table: Table, columns: tuple[str, ...], rows: int) -> tuple[str, tuple[str, ...]]:
    compiled: Any = insert(table).compile(dialect=dialect, column_keys=columns)
    single = str(compiled)
    return single + f", {single[single.index(' VALUES ') + 8 :]}" * (rows - 1), tuple(compiled.positiontup)


@lru_cache(maxsize=64)
def _update(dialect: Dialect, table: Table, columns: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    (key,) = table.primary_key.columns
    compiled: Any = update(table).where(key == bindparam("at_key")).compile(dialect=dialect, column_keys=columns)
    return str(compiled), tuple(key.name if name == "at_key" else name for name in compiled.positiontup)


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
    accepted_s: dict[int, float] = field(default_factory=dict[int, float])
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

    connection: Connection
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
    finished: list[int] = field(default_factory=list[int])
    checked_once: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])
    written_once: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])
    #: Serial, number of its attempts or images, source of the last image.
    suspect_serials: list[tuple[str, int, str]] = field(default_factory=list[tuple[str, int, str]])

    def board(self, board_type: str, serial: str) -> BoardAttempts:
        self.touched.add((board_type, serial))
        return self.boards.get(self.connection, board_type, serial)

    def attempt(self, board_type: str, serial: str, number: int) -> tuple[Attempt, Row]:
        found = self.board(board_type, serial).get(self.connection, number)
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
        if new:
            add_rows(self.connection, table, new)

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

    def take_due(self) -> list[tuple[str, str, int]]:
        while self.memory.due and self.memory.due[0][0] <= self.now_s:
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
        for inspection_id in self.finished:
            memory.accepted_s.pop(inspection_id, None)
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


@contextmanager
def begin(engine: Engine, boards: BoardCache, memory: WriterMemory, clock: Clock) -> Iterator[Transaction]:
    tx: Transaction | None = None
    try:
        with engine.begin() as connection:
            before = memory.numbers or read_numbers(connection)
            now_wall_s = clock.wall_s()
            tx = Transaction(
                *(connection, replace(before), now_wall_s, utc_text(now_wall_s), clock.monotonic_s(), boards, memory)
            )
            yield tx
            if tx.numbers != before:
                seq, inspection_id, board_id = tx.numbers.seq, tx.numbers.inspection_id, tx.numbers.board_id
                run_prepared(connection, _SET_NUMBERS, seq=seq, inspection_id=inspection_id, board_id=board_id)
    except BaseException:
        if tx is not None:
            tx.forget()
        raise
    tx.adopt()


def read_numbers(connection: Connection) -> LastNumbers:
    row = run_prepared(connection, _NUMBERS).fetchone()
    if row is None:
        zeros = {"last_seq": 0, "last_inspection_id": 0, "last_board_id": 0}
        connection.execute(insert(stream_position), [{"position_id": 1} | zeros])
        return LastNumbers(0, 0, 0)
    return LastNumbers(*row)
