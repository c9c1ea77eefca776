"""Whether a line's files can be where its configuration has them, before anything is written (`coserve check`)."""

import os
from pathlib import Path

from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from daemon.config.settings import Config
from daemon.storage.database.connections import StoreError, open_for_reading, sqlite_path
from daemon.storage.database.migrate import check_schema


def storage_problems(config: Config) -> list[str]:
    """Why a start would end: a database this version cannot use, folders that cannot be made; each names its key."""
    folders = {"journal": config.journal, "images": config.images}
    problems = [f"{key}: {problem}" for key, folder in folders.items() if (problem := folder_problem(folder))]
    if config.record is not None and not config.record.parent.is_dir():
        problems.append(f"record: there is no folder {config.record.parent}: make it")
    try:
        _check_database(config.database)
    except StoreError as error:
        problems.append(f"database: {error}")
    return problems


def _check_database(url: str) -> None:
    """StoreError where it cannot be used. A file that is missing is fine: the first start makes it."""
    try:
        path = sqlite_path(url)
        if path is not None and (problem := folder_problem(path.parent)):
            raise StoreError(problem)
        if path is not None and not path.exists():
            return
        engine = open_for_reading(url)
    except (ImportError, ArgumentError) as error:
        raise StoreError(f"cannot use {url}: {error}; name a file, for example sqlite:///inspection.db") from None
    try:
        check_schema(engine)
    except SQLAlchemyError as error:
        raise StoreError(f"cannot read {engine.url.render_as_string()}: {error}") from None
    finally:
        engine.dispose()


def folder_problem(folder: Path) -> str | None:
    """Why files cannot be written below `folder`, which may be still to be made."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file, where a folder is needed: move it, or name another folder"
    # In /proc and the like nothing can be made, whatever the permissions say.
    if not os.access(there, os.W_OK | os.X_OK) or _is_virtual(there):
        return f"nothing can be written in {there}: give this user the right to, or name another folder"
    return None


def _is_virtual(folder: Path) -> bool:
    state = os.statvfs(folder)
    return state.f_blocks == 0
