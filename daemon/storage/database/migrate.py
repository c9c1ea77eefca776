"""Create the results database, or upgrade it (docs/service.md). `PRAGMA user_version` names its schema."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Connection, Engine, inspect
from sqlalchemy.exc import DatabaseError

from daemon.storage.database import upkeep
from daemon.storage.database.connections import StoreError, sqlite_path
from daemon.storage.database.schema import VIEWS, editions, metadata, stream_position
from daemon.storage.database.upkeep import copy_database, database_bytes, room_problem, schema_text

#: Room for the copy, and for a step that rewrites every page.
_ROOM_FACTOR = 2

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Step:
    """A change of the tables, from the previous schema to that of `release`. Views are recreated afterwards."""

    release: str
    change: Callable[[Connection], None]


FIRST_SCHEMA = "0.1.0"
#: Oldest first. A change of schema.py comes with a step here that brings older databases to the same schema.
STEPS: tuple[Step, ...] = ()


def known_schemas() -> list[str]:
    return [FIRST_SCHEMA, *(step.release for step in STEPS)]


def migrate(engine: Engine, tell: Tell = lambda _: None) -> None:
    """Create the schema, or copy the old file aside and take the steps that are due.

    All steps are one transaction: if the process dies in between, the old database is unchanged and the next start
    tries again. `tell` gets the progress.
    """
    path, schema, schemas = sqlite_path(engine.url), check_schema(engine), known_schemas()
    if schema == schemas[-1]:
        with engine.begin() as connection:
            _make_views(connection)
        return
    log: Any = structlog.get_logger("database")
    began_s = time.monotonic()
    if schema is not None:
        copy = _copy_aside(path, schemas[-1], tell)
        log.info("database_migrating", schema=schema, to=schemas[-1], copy=str(copy))
    upkeep.run(engine, "PRAGMA foreign_keys = OFF")  # while tables are rebuilt; inside a transaction without effect
    try:
        with engine.begin() as connection:
            _drop_views(connection)
            if schema is None:
                metadata.create_all(connection)
            else:
                for step in STEPS[schemas.index(schema) :]:
                    step.change(connection)
            _make_views(connection)
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
            if broken is not None:
                raise StoreError(f"a row of {broken[0]} names no row of {broken[2]}: {path} is left as it was")
            connection.exec_driver_sql(f"PRAGMA user_version = {_number(schemas[-1]):d}")
    except DatabaseError as error:
        raise StoreError(f"cannot bring {path} to schema {schemas[-1]}: {error.orig}; it is left as it was") from error
    finally:
        upkeep.run(engine, "PRAGMA foreign_keys = ON")
    if schema is not None:
        log.info("database_migrated", schema=schemas[-1], took_s=round(time.monotonic() - began_s, 3))


def _drop_views(connection: Connection) -> None:
    for view in reversed(VIEWS):
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {view}")


def _make_views(connection: Connection) -> None:
    """Make the views, unless they are there: those of an earlier version hold no data."""
    made = {view: f"CREATE VIEW {view} AS {select}" for view, select in VIEWS.items()}
    there = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'view'").all()
    if not made.items() <= {tuple(row) for row in there}:
        _drop_views(connection)
        for statement in made.values():
            connection.exec_driver_sql(statement)


def check_schema(engine: Engine) -> str | None:
    """Return the database's schema, None if it is empty; StoreError if this version cannot use it. Writes nothing."""
    path = sqlite_path(engine.url)
    try:
        with engine.connect() as connection:
            number = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            tables = inspect(connection).get_table_names()
    except DatabaseError as error:
        raise StoreError(f"cannot read {path}: {error.orig}; restore a copy, or name another `database`") from error
    if not tables:
        return None
    is_ours = stream_position.name in tables
    if is_ours and (number == 0 or editions.name not in tables):
        raise StoreError(
            f"{path} was written by a CoServe from before 0.1.0, which cannot be upgraded: start with a new one, as"
            ' docs/service.md says under "Starting over"; any SQLite tool still reads the old one'
        )
    if not is_ours:
        raise StoreError(
            f"{path} holds tables of another program ({tables[0]}, ...): name another `database` in coserve.yaml"
        )
    schema = schema_text(number)
    if schema not in known_schemas():
        copy = next(iter(_copies_of(path)), f"the copy that it made, {path.name}.before-{schema}")
        raise StoreError(
            f"{path} was written by a newer version of CoServe (schema {schema}; this one knows up to"
            f" {known_schemas()[-1]}): install CoServe {schema} or newer again, or put back {copy}, as"
            " docs/service.md says"
        )
    return schema


def _number(release: str) -> int:
    """Return `1.2.3` as 1002003, which `PRAGMA user_version` holds."""
    major, minor, patch = (int(part) for part in re.findall(r"\d+", release))
    return (major * 1000 + minor) * 1000 + patch


def _copies_of(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{path.name}.before-*"))


def _copy_aside(path: Path, schema: str, tell: Tell) -> Path:
    """Make a complete, durable copy beside the file; it replaces the copy of an earlier upgrade."""
    problem = room_problem(path.parent, _ROOM_FACTOR * database_bytes(path), f"bringing {path} to this version")
    if problem:
        raise StoreError(f"{problem} and start again")
    copy = path.with_name(f"{path.name}.before-{schema}")
    copy_database(
        path, copy, on_progress=lambda done, total: tell(f"copying the database aside: {100 * done // total} %")
    )
    for older in _copies_of(path):
        if older != copy:
            older.unlink()
    return copy
