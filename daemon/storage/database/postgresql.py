"""Connections to PostgreSQL (extra `postgresql`), set up so that the line gets the answers that SQLite gives."""

from typing import Any

from psycopg import Connection, OperationalError
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.errors import LockNotAvailable
from psycopg.types.string import StrDumperUnknown
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.pool import ConnectionPoolEntry

#: The advisory lock of the daemon that writes: one line has one database.
_WRITER_LOCK = int.from_bytes(b"CoServe", "big")
#: A busy server may notice late that a daemon was killed, and keeps that daemon's lock so long.
_LOCK_WAIT_MS = 30_000
#: libpq's settings, in s (`tcp_user_timeout` in ms): a lost server is noticed within some 15 s. A URL may set others.
_CLIENT_TIMEOUTS = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 15_000,
}
#: The same at the server's end of the connection that has the lock. By default a server notices after two hours that a
#: machine was cut off: so long a restarted daemon would wait for the lock of its own last run.
_SERVER_TIMEOUTS = {
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "2",
    "tcp_user_timeout": "15000",
}


def open_for_writing(url: str, busy_timeout_ms: int) -> Engine:
    """Open one connection with durable commits. OperationalError, at any use, while another daemon writes there."""
    engine = _engine(url, pool_size=1, max_overflow=0)

    @event.listens_for(engine, "connect")
    def become_writer(connection: Connection, _entry: ConnectionPoolEntry) -> None:  # pyright: ignore[reportUnusedFunction]
        try:
            _become_writer(connection, busy_timeout_ms)
        except BaseException:
            connection.close()
            raise

    return engine


def open_for_reading(url: str) -> Engine:
    """Open an engine that cannot write; each transaction sees one state of the database."""
    return _engine(url, execution_options={"postgresql_readonly": True, "isolation_level": "REPEATABLE READ"})


def _engine(url: str, **options: Any) -> Engine:
    named = make_url(url).query
    timeouts = {name: value for name, value in _CLIENT_TIMEOUTS.items() if name not in named}
    # The ping replaces a connection that a restart of the server has ended, before a query fails on it.
    engine = create_engine(url, pool_pre_ping=True, connect_args=timeouts, **options)

    @event.listens_for(engine, "connect")
    def adapt(connection: Connection, _entry: ConnectionPoolEntry) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.adapters.register_loader("numeric", _Number)
        connection.adapters.register_dumper(str, _Text)

    return engine


def _become_writer(connection: Connection, busy_timeout_ms: int) -> None:
    """Set durable commits and take the lock, which ends with its connection; OperationalError if another has it."""
    connection.autocommit = True
    connection.execute(
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )
    setting = "SELECT set_config(%s, %s, false)"
    for name, value in _SERVER_TIMEOUTS.items():  # without effect behind a Unix socket
        connection.execute(setting, (name, value))
    connection.execute(setting, ("lock_timeout", f"{_LOCK_WAIT_MS:d}ms"))
    try:
        connection.execute("SELECT pg_advisory_lock(%s)", (_WRITER_LOCK,))
    except LockNotAvailable:
        raise OperationalError("another daemon writes to this database: stop that one first") from None
    connection.execute(setting, ("lock_timeout", f"{busy_timeout_ms:d}ms"))
    connection.autocommit = False


class _Number(Loader):
    """Loads `numeric`, the type of sums and shares, as int or float, as SQLite gives them."""

    def load(self, data: Buffer) -> int | float:
        text = bytes(data)
        return int(text) if text.lstrip(b"-").isdigit() else float(text)


class _Text(StrDumperUnknown):
    """Writes U+FFFD for the character U+0000, which PostgreSQL's texts cannot hold."""

    def dump(self, obj: str) -> Buffer | None:
        return super().dump(obj.replace("\0", "\ufffd"))
