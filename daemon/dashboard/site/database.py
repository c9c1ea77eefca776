"""The results database for pages: read-only, limited in rows and time, with cached answers.

Every question is a short transaction of its own, so that none holds up the truncation of the database's log.
"""

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar

from sqlalchemy import Engine, Executable, Row, bindparam, text
from sqlalchemy.exc import SQLAlchemyError

from daemon.storage.database.connections import QueryTimeoutError, StoreError, open_for_reading, query_timeout
from daemon.wire.control import ControlError

T = TypeVar("T")

_MAX_QUESTION_S = 5.0
_FAILURE_S = 2.0
#: Rows are fetched one by one: those beyond the limit are never read.
_STREAMED = {"stream_results": True}


class TooMuchToCount(Exception):  # noqa: N818 - the title of the page that reports it
    """The question timed out. The text says how to ask for less."""

    def __init__(self, text: str = "the database took too long: ask for a shorter time or fewer rows") -> None:
        super().__init__(text)


class NoDatabase(Exception):  # noqa: N818
    """The database cannot be read now; the text says why."""


class Database:
    def __init__(self, url: str, open_engine: Callable[[str], Engine] = open_for_reading) -> None:
        """The first question opens `url`: without a database, probes of the daemon are answered."""
        self._url, self._open_engine = url, open_engine

    @cached_property
    def _engine(self) -> Engine:
        try:
            return self._open_engine(self._url)
        except StoreError as error:
            raise NoDatabase(str(error)) from None

    def rows(
        self,
        statement: str | Executable,
        parameters: Mapping[str, Any] | None = None,
        *,
        limit: int,
        timeout_s: float = _MAX_QUESTION_S,
    ) -> list[Row[Any]]:
        """Return at most `limit` rows; `parameters` are bound, a list for `IN`. TooMuchToCount after `timeout_s`."""
        bound = dict(parameters or {})
        lists = [bindparam(name, expanding=True) for name, value in bound.items() if isinstance(value, list)]
        question = text(statement).bindparams(*lists) if isinstance(statement, str) else statement
        try:
            with (
                self._engine.connect() as connection,
                query_timeout(connection, timeout_s),
                connection.execute(question, bound, execution_options=_STREAMED) as result,
            ):
                return list(result.fetchmany(limit))
        except QueryTimeoutError:
            raise TooMuchToCount from None
        except SQLAlchemyError as error:
            raise NoDatabase(str(getattr(error, "orig", None) or error)) from None

    def first(self, statement: str | Executable, **parameters: Any) -> Row[Any] | None:
        return next(iter(self.rows(statement, parameters, limit=1)), None)

    def number(self, statement: str | Executable, **parameters: Any) -> int:
        """Return the first column of the first row, 0 for NULL."""
        row = self.first(statement, **parameters)
        return int(row[0] or 0) if row is not None else 0

    def id_before_newest(self, images: int) -> int:
        return self.number("SELECT max(inspection_id) FROM inspections") - images

    def close(self) -> None:
        if "_engine" in vars(self):
            self._engine.dispose()


def ask_or(default: T, ask: Callable[[], T], topic: str, problems: list[str]) -> T:
    """Return `ask()`. If it fails, note the reason in `problems` and return `default`: the page shows the rest."""
    try:
        return ask()
    except (ControlError, NoDatabase, TooMuchToCount) as error:
        problems.append(f"{topic}: {error}")
        return default


class CachedAnswer(Generic[T]):
    """An answer kept for `seconds`, a failure for two at most. Callers that come meanwhile wait for it. Any thread."""

    def __init__(self, seconds: float, make: Callable[[], T]) -> None:
        self._seconds = seconds
        self._make = make
        self._lock = threading.Lock()
        self._until_s = float("-inf")
        self._result: tuple[T] | Exception = KeyError()

    def get(self) -> T:
        with self._lock:
            if time.monotonic() >= self._until_s:
                kept_s = self._seconds
                try:
                    self._result = (self._make(),)
                except Exception as error:  # noqa: BLE001 - raised below, for every caller
                    self._result, kept_s = error, min(kept_s, _FAILURE_S)
                self._until_s = time.monotonic() + kept_s
            result = self._result
        if isinstance(result, Exception):
            raise result.with_traceback(None)  # a traceback would grow with every caller
        return result[0]


class CachedAnswers:
    """Cached answers by key, the `max_answers` used last."""

    def __init__(self, seconds: float, max_answers: int) -> None:
        self._seconds = seconds
        self._max_answers = max_answers
        self._lock = threading.Lock()
        self._answers: dict[Hashable, CachedAnswer[Any]] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            answer = self._answers.pop(key, None) or CachedAnswer(self._seconds, make)
            self._answers[key] = answer
            while len(self._answers) > self._max_answers:
                del self._answers[next(iter(self._answers))]
        return answer.get()
