"""The kinds of consumers, by the `kind` of their settings; each is imported when one is made."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from daemon.consumers.protocol import Consumer
from daemon.consumers.settings import MqttSettings
from daemon.errors import MissingExtraError


def make_consumer(name: str, settings: MqttSettings, journal: Path) -> Consumer:
    """Return the consumer `name` of the line with this journal, not yet connected.

    Raises MissingExtraError where its packages are not installed.
    """
    return KINDS[settings.kind](settings, _identifier(name, journal))


def _mqtt(settings: MqttSettings, identifier: str) -> Consumer:
    try:
        from daemon.consumers.mqtt import Mqtt  # noqa: PLC0415 - of the extra `mqtt`
    except ModuleNotFoundError as missing:
        raise MissingExtraError(missing.name, "this consumer", "mqtt") from None
    return Mqtt(settings, identifier)


KINDS: Mapping[str, Callable[[MqttSettings, str], Consumer]] = {"mqtt": _mqtt}


def _identifier(name: str, journal: Path) -> str:
    """Return a name that no consumer of any other line has, the same at each start."""
    line = f"{os.uname().nodename}:{journal.resolve()}"
    return f"coserve-{name}-{hashlib.sha256(line.encode()).hexdigest()[:8]}"
