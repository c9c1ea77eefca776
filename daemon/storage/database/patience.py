"""Questions that people ask get so much time and no more: a page that counts for minutes helps nobody."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

#: SQLite looks at the clock every so many steps of its virtual machine, which is about a millisecond.
_STEPS = 20_000


class TooLongError(Exception):
    """A question was broken off because its time was up."""


@contextmanager
def at_most(connection: Connection, seconds: float) -> Iterator[None]:
    """Whatever is asked of `connection` inside ends within `seconds`; TooLongError where it had to be broken off."""
    if connection.dialect.name == "sqlite":
        with _sqlite(connection, time.monotonic() + seconds):
            yield
    else:
        connection.execute(text(f"SET LOCAL statement_timeout = {round(seconds * 1000):d}"))
        try:
            yield
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == "57014":  # query_canceled
                raise TooLongError from None
            raise


@contextmanager
def _sqlite(connection: Connection, until_s: float) -> Iterator[None]:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    driver.set_progress_handler(lambda: time.monotonic() > until_s, _STEPS)
    try:
        yield
    except DBAPIError as error:
        if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise TooLongError from None
        raise
    finally:
        driver.set_progress_handler(None, 0)
