"""A line as a command opens it: its configuration, its database for reading. An error is one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.config.settings import Config, load_config
from daemon.errors import ConfigError
from tools.cli.console import exit_on, fail

if TYPE_CHECKING:
    from sqlalchemy import Engine


def settings_of(config: Path) -> Config:
    """Return the line's configuration; exit with status 2 if there is no such file, or if it has mistakes."""
    if not config.is_file():
        fail(f"no file {config}: name the line's coserve.yaml, or make a small line with `coserve demo`", status=2)
    with exit_on(ConfigError, status=2):
        return load_config(config)


@contextmanager
def reading(settings: Config) -> "Iterator[Engine]":
    """Yield an engine that cannot write; exit with status 1 if the database cannot be read."""
    from sqlalchemy.exc import SQLAlchemyError  # slow to import, and commands that only ask the daemon do not need it

    from daemon.storage.database.connections import StoreError, open_for_reading, redacted_url

    try:
        engine = open_for_reading(settings.database)
    except StoreError as error:
        fail(str(error), status=1)
    try:
        yield engine
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error.__class__.__name__
        fail(f"cannot read {redacted_url(settings.database)} ({cause}): has this line run?", status=1)
    finally:
        engine.dispose()


@contextmanager
def opened(config: Path) -> "Iterator[tuple[Config, Engine]]":
    """Yield the configuration and an engine that cannot write."""
    settings = settings_of(config)
    with reading(settings) as engine:
        yield settings, engine
