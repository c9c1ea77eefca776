"""Bring the results database to this version's schema; an older file is copied aside first (RESULTS.md)."""

import sqlite3
from contextlib import closing
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import DatabaseError

from daemon.store.database import FILE_MODE, StoreError, sqlite_path
from daemon.store.views import VIEWS


def migrate(engine: Engine) -> Path | None:
    """Run the migrations that are due and say where the old file was copied, None where there was nothing to copy."""
    config = alembic_config()
    scripts = ScriptDirectory.from_config(config)
    head = scripts.get_current_head()
    name = engine.url.render_as_string()
    try:
        with engine.connect() as connection:
            found = MigrationContext.configure(connection).get_current_revision()
            tables = inspect(connection).get_table_names()
    except DatabaseError as error:
        raise StoreError(f"cannot read {name}: {error.orig}; restore a copy, or name another `database`") from error
    if found == head:
        return None
    if found is None and tables:
        raise StoreError(
            f"{name} holds tables of another program ({tables[0]}, ...): name another `database` in coserve.yaml"
        )
    known = {script.revision for script in scripts.walk_revisions()}
    if found is not None and found not in known:
        raise StoreError(
            f"{name} was written by a newer version of CoServe (schema {found}; this one knows up to {head}): "
            f"install that version again, or put back the copy that it made, *.before-{found}"
        )
    copy = _copy_aside(engine, f"before-{head}") if found is not None else None
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        _drop_views(connection)
        command.upgrade(config, "head")
        for view, select in VIEWS.items():
            connection.execute(text(f"CREATE VIEW {view} AS {select}"))
    return copy


def alembic_config() -> Config:
    """Alembic's settings, without a file of its own: the revisions lie inside this package."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _drop_views(connection: Connection) -> None:
    for view in inspect(connection).get_view_names():
        if view in VIEWS:
            connection.execute(text(f"DROP VIEW {view}"))


def _copy_aside(engine: Engine, suffix: str) -> Path | None:
    """A whole copy beside the file, durable before the migration begins; other databases have their own backups."""
    path = sqlite_path(engine.url)
    if path is None:
        return None
    copy = path.with_name(f"{path.name}.{suffix}")
    part = path.with_name(f"{path.name}.{suffix}.part")
    part.unlink(missing_ok=True)
    part.touch(mode=FILE_MODE)
    try:
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(part)) as target:
            source.backup(target)
    except (sqlite3.Error, OSError) as error:
        part.unlink(missing_ok=True)
        raise StoreError(f"cannot copy {path} aside to {copy}: {error}; free some room and start again") from error
    part.chmod(FILE_MODE)
    part.replace(copy)
    return copy
