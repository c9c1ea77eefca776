"""A line as a command opens it: its configuration, its database for reading, its clock. An error is one sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daemon.config.plant_time import PlantTime
from daemon.config.settings import Config, load_config
from daemon.errors import ConfigError
from daemon.host.folders import FOLDER_LOCK, owner
from daemon.wire.control import ask
from daemon.wire.keys import read_password
from tools.terminal.console import exit_on, fail, need_file

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from daemon.plant.settings import HubSettings

_STORED_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")


def settings_of(config: Path) -> Config:
    """Exit with status 2 if there is no such file, or if it has mistakes."""
    need_file(config)
    with exit_on(ConfigError, status=2):
        return load_config(config)


def must_be_its_configuration(config: Path) -> None:
    """Exit with status 1 if the daemon that answers was started with another file."""
    socket = Path(settings_of(config).endpoints.control.removeprefix("ipc://"))
    process, line = owner(socket.with_name(socket.name + FOLDER_LOCK))
    if process and line and Path(line).is_file() and not config.samefile(line):
        fail(f"the daemon at {socket} (process {process}) was started with {line}, not {config}: name that", status=1)


def ask_daemon(settings: Config, kind: str, timeout_s: float = 5.0, **fields: Any) -> dict[str, Any]:
    """Ask the line's daemon; `fields` that are None are left out. Raises ControlError."""
    stated = {name: value for name, value in fields.items() if value is not None}
    return ask(settings.endpoints.control, kind, timeout_s=timeout_s, **stated)


@contextmanager
def reading(settings: "Config | HubSettings") -> "Iterator[Engine]":
    """Yield an engine that cannot write; exit with status 1 if the database cannot be read."""
    from sqlalchemy.exc import SQLAlchemyError  # slow to import, and commands that only ask the daemon do not need it

    from daemon.storage.database.connections import open_for_reading

    is_line = isinstance(settings, Config)
    if is_line:
        engine = open_for_reading(settings.database)
    else:
        from daemon.plant.reading import open_hub_for_reading

        engine = open_hub_for_reading(settings.database)
    try:
        yield engine
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error.__class__.__name__
        name = settings.database if is_line else engine.url.difference_update_query(["password"]).render_as_string()
        fail(f"cannot read {name} ({cause}): has this {'line' if is_line else 'hub'} run?", status=1)
    finally:
        engine.dispose()


@contextmanager
def opened(config: Path) -> "Iterator[tuple[Config, Engine]]":
    settings = settings_of(config)
    with reading(settings) as engine:
        yield settings, engine


def plant_settings_of(plant: Path) -> "HubSettings":
    """Return plant.yaml, with its password in `database`; exit with status 2 if it cannot be used."""
    from sqlalchemy.engine import make_url

    from daemon.plant.settings import load_plant

    need_file(plant, "name the plant.yaml of the hub")
    with exit_on(ConfigError, status=2):
        settings = load_plant(plant)
    if settings.password is None:
        return settings
    url = make_url(settings.database).set(password=read_password(settings.password))
    return settings.model_copy(update={"database": url.render_as_string(hide_password=False)})


def plant_time(plant: PlantTime, at: str | None, style: str = "full") -> str | None:
    """Return a stored time by the plant's clock: `2026-11-25 10:44:51 CET`, `11-25 10:44:51` if `short`."""
    return _STORED_TIME.sub(lambda match: plant.text(match[0], style), at) if at is not None else None
