"""Read-only connections to the hub's database, set up so that pages and commands get the values that SQLite gives."""

from psycopg import Connection
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.types.string import StrDumperUnknown
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.pool import ConnectionPoolEntry

from daemon.consumers.plant.settings import TIMEOUTS


def open_hub_for_reading(url: str) -> Engine:
    """Open an engine that cannot write; each transaction sees one state of the database. A URL may set its timeouts."""
    named = make_url(url).query
    timeouts = {name: value for name, value in TIMEOUTS.items() if name not in named}
    # The ping replaces a connection that a restart of the server has ended, before a query fails on it.
    options = {"postgresql_readonly": True, "isolation_level": "REPEATABLE READ"}
    engine = create_engine(url, pool_pre_ping=True, connect_args=timeouts, execution_options=options)

    @event.listens_for(engine, "connect")
    def adapt(connection: Connection, _entry: ConnectionPoolEntry) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.adapters.register_loader("numeric", _Number)
        connection.adapters.register_dumper(str, _Text)

    return engine


class _Number(Loader):
    """Loads `numeric`, the type of sums and shares, as int or float, as SQLite gives them."""

    def load(self, data: Buffer) -> int | float:
        text = bytes(data)
        return int(text) if text.lstrip(b"-").isdigit() else float(text)


class _Text(StrDumperUnknown):
    """Replaces U+0000, which PostgreSQL's texts cannot hold, by U+FFFD."""

    def dump(self, obj: str) -> Buffer | None:
        return super().dump(obj.replace("\0", "\ufffd"))
