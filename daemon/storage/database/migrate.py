"""Bring the results database to this version's schema; an older file is copied aside first (docs/upgrading.md)."""

import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import DatabaseError

from daemon.storage.database.connections import StoreError, redacted_url, sqlite_path
from daemon.storage.database.schema import VIEWS, metadata
from daemon.storage.database.upkeep import copy_database, database_bytes, room_problem

#: Copies from before a migration that stay beside the database, the newest ones.
KEPT_COPIES = 2
#: A migration may write every page again beside the copy that was made of it.
_ROOM_FACTOR = 2
#: SQLite's virtual machine reports progress after this many instructions: some 10 ms.
_INSTRUCTIONS = 1_000_000

Tell = Callable[[str], None]


def migrate(engine: Engine, tell: Tell = lambda _: None) -> Path | None:
    """Make the schema, or run the migrations that are due; return the copy of the old file, None if none was made.

    Everything is one transaction: if the process ends in between, the old database stays and the next start begins
    again. `tell` gets the progress, at least once a second, so that a supervisor grants the time.
    """
    config = alembic_config()
    scripts = ScriptDirectory.from_config(config)
    head = scripts.get_current_head()
    schema = _schema(engine)
    if schema == head:
        return None
    _require_known(engine, schema, scripts)
    log: Any = structlog.get_logger("database")
    began_s = time.monotonic()
    copy = _copy_aside(engine, f"before-{head}", tell) if schema is not None else None
    if schema is not None:
        log.info("database_migrating", schema=schema, to=head, copy=str(copy))
    try:
        with _relaxed(engine, tell), engine.begin() as connection:
            config.attributes["connection"] = connection
            if schema is None:
                metadata.create_all(connection)
                command.stamp(config, "head")
            else:
                views = inspect(connection).get_view_names()
                for view in reversed([view for view in VIEWS if view in views]):
                    connection.execute(text(f"DROP VIEW {view}"))
                command.upgrade(config, "head")
            for view, select in VIEWS.items():
                connection.execute(text(f"CREATE VIEW {view} AS {select}"))
            _seal(connection)
    except DatabaseError as error:
        name, why = redacted_url(engine.url), _reason(error)
        raise StoreError(f"cannot bring {name} to schema {head}: {why}; it is left as it was") from error
    if copy is not None:
        log.info("database_migrated", schema=head, took_s=round(time.monotonic() - began_s, 3))
        _drop_old_copies(copy)
    return copy


def check_schema(engine: Engine) -> None:
    """Raise StoreError if this version cannot use the database or migrate it. Writes nothing."""
    _require_known(engine, _schema(engine), ScriptDirectory.from_config(alembic_config()))


def alembic_config() -> Config:
    """Return Alembic's settings, without a file of its own: the revisions lie inside this package."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def copies_of(path: Path) -> list[Path]:
    """Return the copies that migrations left beside `path`, newest first."""
    copies = (copy for copy in path.parent.iterdir() if copy.name.startswith(f"{path.name}.before-"))
    return sorted(copies, key=lambda copy: copy.stat().st_mtime_ns, reverse=True)


def _schema(engine: Engine) -> str | None:
    """Return the database's revision, None for an empty one; StoreError if it is not ours."""
    name = redacted_url(engine.url)
    try:
        with engine.connect() as connection:
            schema = MigrationContext.configure(connection).get_current_revision()
            tables = inspect(connection).get_table_names()
    except DatabaseError as error:
        is_file = sqlite_path(engine.url) is not None
        remedy = "restore a copy" if is_file else "see to that server (docs/results.md says what it has to have)"
        raise StoreError(f"cannot read {name}: {_reason(error)}; {remedy}, or name another `database`") from error
    if schema is None and tables:
        raise StoreError(
            f"{name} holds tables of another program ({tables[0]}, ...): name another `database` in coserve.yaml"
        )
    return schema


def _require_known(engine: Engine, schema: str | None, scripts: ScriptDirectory) -> None:
    """Raise StoreError for a schema that this version does not know; it names what to install, put back or leave."""
    known = {script.revision for script in scripts.walk_revisions()}
    if schema is None or schema in known:
        return
    path = sqlite_path(engine.url)
    name, writer, copy = redacted_url(engine.url), "that version", "a dump from before"
    head = scripts.get_current_head()
    if path is not None:
        name = f"sqlite:///{path}"  # the reader's own URL has more in it
        with closing(sqlite3.connect(path)) as database:
            (number,) = database.execute("PRAGMA user_version").fetchone()
        usable = next((copy for copy in copies_of(path) if _schema_of_file(copy) in known), None)
        if not usable and number and number <= _version_number(version("coserve")):
            raise StoreError(
                f"{name} was written by a development version of CoServe (schema {schema}; this one knows up to"
                f" {head}), which cannot be upgraded: start with a new one, as docs/retention.md says under"
                f' "Starting over"; any SQLite tool still reads the old one'
            )
        if number:
            writer = f"CoServe {number // 1_000_000}.{number // 1000 % 1000}.{number % 1000} or newer"
        copy = f"the copy {usable}" if usable else f"the copy that it made, *.before-{schema}"
    raise StoreError(
        f"{name} was written by a newer version of CoServe (schema {schema}; this one knows up"
        f" to {head}): install {writer} again, or put back {copy}, as docs/upgrading.md says"
    )


def _schema_of_file(path: Path) -> str | None:
    try:
        with closing(sqlite3.connect(path)) as database:
            return database.execute("SELECT version_num FROM alembic_version").fetchone()[0]
    except (sqlite3.Error, TypeError):
        return None


def _reason(error: DatabaseError) -> str:
    """Return the cause in one line; PostgreSQL's own text has several."""
    return " ".join(str(error.orig).split())


def _copy_aside(engine: Engine, suffix: str, tell: Tell) -> Path | None:
    """Make a complete, durable copy beside the file; None for other databases, which have their own backups."""
    path = sqlite_path(engine.url)
    if path is None:
        return None
    problem = room_problem(path.parent, _ROOM_FACTOR * database_bytes(path), f"bringing {path} to this version")
    if problem:
        raise StoreError(f"{problem} and start again")
    copy = path.with_name(f"{path.name}.{suffix}")
    tell_each = _each_second(tell)
    copy_database(
        path, copy, on_progress=lambda done, total: tell_each(f"copying the database aside: {100 * done // total} %")
    )
    return copy


def _drop_old_copies(newest: Path) -> None:
    name = newest.name.rpartition(".before-")[0]
    for copy in [copy for copy in copies_of(newest.with_name(name)) if copy != newest][KEPT_COPIES - 1 :]:
        copy.unlink()


@contextmanager
def _relaxed(engine: Engine, tell: Tell) -> Iterator[None]:
    """Prepare SQLite for migrations: foreign keys off while tables are rebuilt, progress of long statements on."""
    if sqlite_path(engine.url) is None:
        yield
        return
    tell_each = _each_second(tell)

    def report_progress() -> int:
        tell_each("bringing the database to this version")
        return 0  # go on

    database: Any = engine.raw_connection()
    try:
        database.execute("PRAGMA foreign_keys = OFF")  # without effect inside a transaction
        database.set_progress_handler(report_progress, _INSTRUCTIONS)
        yield
    finally:
        database.set_progress_handler(None, 0)
        database.execute("PRAGMA foreign_keys = ON")
        database.close()


def _seal(connection: Connection) -> None:
    """Check the foreign keys, which were off meanwhile, and note the version that made this schema."""
    if connection.dialect.name != "sqlite":
        return
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
    if broken is not None:
        raise StoreError(f"a row of {broken[0]} names no row of {broken[2]}: the database is left as it was")
    connection.exec_driver_sql(f"PRAGMA user_version = {_version_number(version('coserve')):d}")


def _version_number(text: str) -> int:
    """Return `1.2.3` as 1002003, which `PRAGMA user_version` holds."""
    major, minor, patch = (int(part) for part in (*re.findall(r"\d+", text), "0", "0")[:3])
    return (major * 1000 + minor) * 1000 + patch


def _each_second(tell: Tell) -> Tell:
    """Return a function that calls `tell` at most once a second."""
    last_s = -1.0

    def tell_sometimes(what: str) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= 1.0:
            last_s = now_s
            tell(what)

    return tell_sometimes
