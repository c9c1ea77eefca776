"""Check the places of a line's files before anything is written (`coserve check`)."""

from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from daemon.config.settings import Config
from daemon.host.folders import folder_problem
from daemon.storage.database.connections import StoreError, open_for_reading, sqlite_path
from daemon.storage.database.migrate import check_schema


def storage_problems(config: Config) -> list[str]:
    """Return why a start would fail: an unusable database, folders that cannot be made; each problem names its key."""
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
    """Raise StoreError if the database cannot be used. A missing file is fine: the first start makes it."""
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
