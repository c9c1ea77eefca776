"""Statements of the hot path: compiled once for the database's dialect, then handed to its driver as they are.

SQLAlchemy's own way costs 60 µs a question and 5 µs a row more (measured), most of it under the interpreter's lock.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

from sqlalchemy import Connection, CursorResult, Engine, Executable, Table, insert
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import OperationalError

Row = dict[str, Any]
T = TypeVar("T")


#: Rows or values of one statement; no table has so many columns that 64 rows come near SQLite's 32,766 values.
_AT_ONCE = (64, 32, 16, 8, 4, 2, 1)


class Question:
    """A SELECT with named parameters, asked in a transaction of its own. Any thread."""

    def __init__(self, engine: Engine, query: Executable) -> None:
        self._engine = engine
        self._sql, self._values = _prepare(engine.dialect, query)

    def first(self, **values: Any) -> Sequence[Any] | None:
        """The first row, None where there is none. OperationalError where the database gives no answer."""
        try:
            # Giving the connection back ends what the driver may have begun.
            with closing(self._engine.raw_connection()) as connection, closing(connection.cursor()) as cursor:
                cursor.execute(self._sql, self._values(values))
                return cursor.fetchone()
        except self._engine.dialect.loaded_dbapi.Error as error:
            raise OperationalError(self._sql, values, error) from error


def run(connection: Connection, statement: Executable, **values: Any) -> CursorResult[Any]:
    """Execute `statement`, which is made once for all calls, with its named parameters."""
    sql, values_of = _prepare(connection.dialect, statement)
    return connection.exec_driver_sql(sql, values_of(values))


def ask_for_each(
    connection: Connection, query: Callable[[int], Executable], each: Sequence[Any], **values: Any
) -> Iterator[Any]:
    """The rows that `query(n)` finds for `each`, n of them at a time as its parameters `each_0` to `each_{n-1}`."""
    for some, count in _parts(each):
        given = {f"each_{number}": value for number, value in enumerate(some)}
        yield from run(connection, query(count), **values, **given)


def add_rows(connection: Connection, table: Table, new: list[Row]) -> None:
    """Insert rows that have the same columns each, many in a statement: each step costs the interpreter's lock."""
    dialect, columns = connection.dialect, tuple(new[0])
    for some, count in _parts(new):
        sql, names = _insert(dialect, table, columns, count)
        if names is None:
            connection.exec_driver_sql(sql, some)
        else:
            connection.exec_driver_sql(sql, tuple(chain.from_iterable(map(itemgetter(*names), some))))


def _parts(whole: Sequence[T]) -> Iterator[tuple[list[T], int]]:
    """`whole` in pieces of few different lengths, so that few statements are prepared."""
    at = 0
    while at < len(whole):
        count = next(size for size in _AT_ONCE if size <= len(whole) - at)
        yield list(whole[at : at + count]), count
        at += count


@lru_cache(maxsize=64)
def _prepare(dialect: Dialect, statement: Executable) -> tuple[str, Callable[[Row], Any]]:
    """The text for the driver, and what makes of named values what goes with it."""
    compiled: Any = statement.compile(dialect=dialect)  # type: ignore[attr-defined]  # every statement has it
    names: Sequence[str] | None = compiled.positiontup
    fixed: Row = compiled.params  # literal values of the statement itself
    if names is None:
        return str(compiled), lambda values: {**fixed, **values}
    return str(compiled), lambda values: tuple(values[name] if name in values else fixed[name] for name in names)


@lru_cache(maxsize=256)
def _insert(dialect: Dialect, table: Table, columns: tuple[str, ...], rows: int) -> tuple[str, tuple[str, ...] | None]:
    """The statement for so many rows, and the order of a row's values; None where the driver wants them by name."""
    compiled: Any = insert(table).compile(dialect=dialect, column_keys=columns)
    names: Sequence[str] | None = compiled.positiontup
    one = str(compiled)
    if names is None:
        return one, None
    return one + f", {one[one.index(' VALUES ') + 8 :]}" * (rows - 1), tuple(names)
