"""The registry of kinds of consumers; a kind's own packages are imported only when one is made."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BaseModel, PlainValidator, SerializeAsAny

from daemon.consumers.mqtt.settings import MqttSettings
from daemon.consumers.plant.settings import PlantSettings
from daemon.consumers.protocol import Consumer, ConsumerSettings, KeyedTexts, LineAccess
from daemon.errors import MissingExtraError

KINDS: Mapping[str, type[ConsumerSettings]] = {"mqtt": MqttSettings, "plant": PlantSettings}

#: A name is a file's name, a process's argument and part of an MQTT client's identifier.
CONSUMER_NAME = r"^[A-Za-z0-9_-]{1,32}$"
CONSUMER_KEYS = frozenset(key for settings in KINDS.values() for key in settings.model_fields)


def make_consumer(name: str, settings: ConsumerSettings, journal: Path, line: LineAccess) -> Consumer:
    """Return the consumer `name` of a line, not yet connected; MissingExtraError if its packages are missing."""
    place = f"{os.uname().nodename}:{journal.resolve()}"
    try:  # the identifier is one that no consumer of another line has, the same at each start
        return settings.make(f"coserve-{name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}", line)
    except ModuleNotFoundError as missing:
        if settings.extra is None:
            raise
        raise MissingExtraError(missing.name, "this consumer", settings.extra[0]) from None


def consumer_mistakes(line: str, consumers: Mapping[str, ConsumerSettings]) -> KeyedTexts:
    names = list(consumers)
    return [
        ((name, *key), text)
        for index, name in enumerate(names)
        for key, text in consumers[name].mistakes(line, {above: consumers[above] for above in names[:index]})
    ]


class _OfNoKind(BaseModel):
    """Finds the mistake in a consumer whose kind is missing or unknown."""

    kind: Literal[tuple(KINDS)]  # type: ignore[valid-type]


def _of_its_kind(section: Any) -> Any:
    if isinstance(section, ConsumerSettings):
        return section
    kind = section.get("kind") if isinstance(section, dict) else None
    return KINDS.get(kind if isinstance(kind, str) else "", _OfNoKind).model_validate(section)


if TYPE_CHECKING:
    AnyConsumer = ConsumerSettings
else:
    AnyConsumer = Annotated[SerializeAsAny[Union[tuple(KINDS.values())]], PlainValidator(_of_its_kind)]  # noqa: UP007
