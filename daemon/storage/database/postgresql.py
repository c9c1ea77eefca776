"""PostgreSQL (extra `postgresql`): what its connections are told, so that the line gets the answers that SQLite gives.

Imported only where a configuration names such a database.
"""

from typing import Any

from psycopg import Connection, OperationalError
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.errors import LockNotAvailable
from psycopg.types.string import StrDumperUnknown
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

#: The advisory lock of whoever writes: one line has one database.
_WRITER = int.from_bytes(b"CoServe", "big")
#: A server that has much to do may be late to see that a daemon was killed, and keeps its lock for as long.
_GONE_WITHIN_MS = 30_000
#: libpq's own words, seconds and milliseconds: a server that is gone is noticed within some 15 s. A URL may say others.
_WAITS = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 15_000,
}
#: The same at the server's end of the connection that has the lock. Where nobody says so, a server looks for a machine
#: that was cut off after two hours: for as long the line would wait for a lock that nobody has but itself.
_WAITS_OF_THE_SERVER = {
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "2",
    "tcp_user_timeout": "15000",
}


def writing(url: str, busy_timeout_ms: int) -> Engine:
    """One connection, durable commits. OperationalError, at any use, while another daemon writes to this database."""
    engine = _engine(url, pool_size=1, max_overflow=0)

    @event.listens_for(engine, "connect")
    def become_writer(connection: Connection, _entry: ConnectionPoolEntry) -> None:  # pyright: ignore[reportUnusedFunction]
        try:
            _become_writer(connection, busy_timeout_ms)
        except BaseException:
            connection.close()
            raise

    return engine


def reading(url: str) -> Engine:
    """An engine that cannot write; each transaction sees one state of the database."""
    return _engine(url, execution_options={"postgresql_readonly": True, "isolation_level": "REPEATABLE READ"})


class Server:
    """The server of a running line's database, as a `Place` (storage/database_place.py). There is nothing to hold."""

    def __init__(self, url: str) -> None:
        self._engine = reading(url)

    def settle(self) -> None:
        """Nothing: a server minds its files."""

    hold = settle

    def look(self) -> str | None:
        """Why no image can be taken now, None where one can."""
        try:
            self._engine.connect().close()  # which asks it, see `_engine`
        except SQLAlchemyError as error:
            return f"the database does not answer: {' '.join(str(getattr(error, 'orig', error)).split())}"
        return None

    def release(self) -> None:
        self._engine.dispose()


def _engine(url: str, **options: Any) -> Engine:
    named = make_url(url).query
    waits = {name: value for name, value in _WAITS.items() if name not in named}
    # After a restart of the server a connection is made anew, and not found to be dead by a question.
    engine = create_engine(url, pool_pre_ping=True, connect_args=waits, **options)

    @event.listens_for(engine, "connect")
    def adapt(connection: Connection, _entry: ConnectionPoolEntry) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.adapters.register_loader("numeric", _Number)
        connection.adapters.register_dumper(str, _Text)

    return engine


def _become_writer(connection: Connection, busy_timeout_ms: int) -> None:
    """Durable commits, and the lock. A daemon that was killed, or a server that stopped, leaves none behind.

    OperationalError where another daemon has it.
    """
    connection.autocommit = True
    connection.execute(
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )
    setting = "SELECT set_config(%s, %s, false)"
    for name, value in _WAITS_OF_THE_SERVER.items():  # behind a Unix socket they say nothing
        connection.execute(setting, (name, value))
    connection.execute(setting, ("lock_timeout", f"{_GONE_WITHIN_MS:d}ms"))
    try:
        connection.execute("SELECT pg_advisory_lock(%s)", (_WRITER,))
    except LockNotAvailable:
        raise OperationalError("another daemon writes to this database: stop that one first") from None
    connection.execute(setting, ("lock_timeout", f"{busy_timeout_ms:d}ms"))
    connection.autocommit = False


class _Number(Loader):
    """`numeric`, which sums and shares are there: whole numbers and floats, as from SQLite."""

    def load(self, data: Buffer) -> int | float:
        text = bytes(data)
        return int(text) if text.lstrip(b"-").isdigit() else float(text)


class _Text(StrDumperUnknown):
    """The sign U+0000, which PostgreSQL's texts cannot hold, becomes U+FFFD."""

    def dump(self, obj: str) -> Buffer | None:
        return super().dump(obj.replace("\0", "\ufffd"))
