"""The results database as pages ask it: read-only, so many rows and so much time at the most, no transaction kept."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Executable, Row, text
from sqlalchemy.exc import SQLAlchemyError

from daemon.storage.database.connections import StoreError, open_for_reading
from daemon.storage.database.patience import TooLongError, at_most

_AT_MOST_S = 5.0
#: Rows are fetched as they are asked for: what is beyond the limit is never made.
_AS_ASKED_FOR = {"stream_results": True}


class TooMuchToCount(Exception):  # noqa: N818 - what the page says
    """The question took too long and was broken off: the page says so, and how to ask for less."""


class NoDatabase(Exception):  # noqa: N818
    """The database cannot be read now; the text says why."""


class Database:
    """Questions from any thread. Every one is a short transaction of its own: none holds up the database's log."""

    def __init__(self, url: str) -> None:
        """NoDatabase where there is none at `url`."""
        try:
            self._engine = open_for_reading(url)
        except StoreError as error:
            raise NoDatabase(str(error)) from None

    def rows(
        self,
        statement: str | Executable,
        parameters: Mapping[str, Any] | None = None,
        *,
        limit: int,
        at_most_s: float = _AT_MOST_S,
    ) -> list[Row[Any]]:
        """At most `limit` rows: a page asks for one more than it shows, and then knows that there are more.

        `parameters` are bound, never put into the text. TooMuchToCount after `at_most_s`, NoDatabase where the
        database cannot be read.
        """
        question = text(statement) if isinstance(statement, str) else statement
        try:
            with (
                self._engine.connect() as connection,
                at_most(connection, at_most_s),
                connection.execute(question, dict(parameters or {}), execution_options=_AS_ASKED_FOR) as found,
            ):
                return list(found.fetchmany(limit))
        except TooLongError:
            raise TooMuchToCount from None
        except SQLAlchemyError as error:
            raise NoDatabase(str(getattr(error, "orig", None) or error)) from None

    def close(self) -> None:
        self._engine.dispose()
