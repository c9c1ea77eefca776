"""The line's database, opened for reading by a command: what goes wrong is one sentence and an exit status."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from daemon.config import Config, load_config
from daemon.errors import ConfigError
from daemon.store.database import StoreError, open_for_reading
from tools.console import fail


@contextmanager
def opened(config: Path) -> Iterator[tuple[Config, Engine]]:
    """The configuration and an engine that cannot write; ends the command where there is nothing to read."""
    if not config.is_file():
        fail(f"no file {config}: name the line's coserve.yaml with --config", status=2)
    try:
        settings = load_config(config)
    except ConfigError as error:
        fail(str(error), status=2)
    try:
        engine = open_for_reading(settings.database)
    except StoreError as error:
        fail(str(error), status=1)
    try:
        yield settings, engine
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error.__class__.__name__
        fail(f"cannot read {settings.database} ({cause}): has this line run? coserve run {config}", status=1)
    finally:
        engine.dispose()
