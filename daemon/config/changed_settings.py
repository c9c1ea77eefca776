"""Settings that changed since the start: a reload reads rules, catalog and keys, but no setting."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from daemon.config.settings import Config, load_config
from daemon.errors import ConfigError

_ABSENT = object()


class StartSettings:
    """The settings of `path` as they were when this was made, to compare the file with later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_start = load_config(path)

    def changed(self) -> tuple[list[str], list[str]]:
        """Return the keys whose values changed, and why the file cannot be read: one of the two is empty."""
        try:
            now = load_config(self._path)
        except ConfigError as error:
            return [], str(error).splitlines()
        return changed_keys(self._at_start, now), []


def changed_keys(before: Config, now: Config) -> list[str]:
    """Return paths such as `devices.cpu.executors` in the file's order; an added or removed section by its own name."""
    return list(_differences(before.model_dump(), now.model_dump(), ()))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], at: tuple[str, ...]) -> Iterator[str]:
    for key in {**before, **now}:
        was, is_now = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if isinstance(was, dict) and isinstance(is_now, dict):
            yield from _differences(was, is_now, (*at, key))
        elif was != is_now:
            yield ".".join((*at, key))
