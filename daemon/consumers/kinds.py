"""The kinds of consumers, by the `kind` of their settings; each is imported when one is made."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from daemon.config.settings import Config
from daemon.consumers.protocol import Consumer
from daemon.consumers.settings import MqttSettings
from daemon.errors import MissingExtraError


def make(config: Config, name: str) -> Consumer:
    """The consumer `name` of `config`, not yet connected. MissingExtraError where its packages are not installed."""
    settings = config.consumers[name]
    return KINDS[settings.kind](settings, _identifier(config, name))


def _mqtt(settings: MqttSettings, identifier: str) -> Consumer:
    try:
        from daemon.consumers.mqtt import Mqtt  # noqa: PLC0415 - of the extra `mqtt`
    except ModuleNotFoundError as missing:
        raise MissingExtraError(missing.name, "this consumer", "mqtt") from None
    return Mqtt(settings, identifier)


KINDS: Mapping[str, Callable[[MqttSettings, str], Consumer]] = {"mqtt": _mqtt}


def _identifier(config: Config, name: str) -> str:
    """One that no other consumer has, of this line or of another, and that stays the same from start to start."""
    line = f"{os.uname().nodename}:{Path(config.journal).resolve()}"
    return f"coserve-{name}-{hashlib.sha256(line.encode()).hexdigest()[:8]}"
