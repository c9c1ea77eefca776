"""The `consumers` of coserve.yaml: where results go beside the line, each with a name of its own."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from daemon.units import Seconds

#: A name is a file's name, a process's argument and part of an MQTT client's identifier.
NAME = r"^[A-Za-z0-9_-]{1,32}$"

Kind = Literal["inspections", "boards", "generations"]
_HOST = r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}"


def _host(value: str) -> str:
    if re.fullmatch(_HOST, value) is None:
        raise ValueError(f"expected a host name or an address such as broker.plant.lan or 192.0.2.7, not {value!r}")
    return value


def _prefix(value: str) -> str:
    """Levels of a topic that come before those of the results (MQTT 5, 4.7)."""
    if re.fullmatch(r"[^\x00-\x1f\x7f+#$/][^\x00-\x1f\x7f+#/]*(/[^\x00-\x1f\x7f+#/]+)*", value) is None:
        raise ValueError(f"expected topic levels such as plant-1/line-2, without + # or an empty level, not {value!r}")
    if len(value.encode()) > 1024:
        raise ValueError("expected a prefix of 1024 bytes at most")
    return value


def _keepalive(value: float) -> float:
    if not 5.0 <= value <= 3600.0:
        raise ValueError("expected a duration from 5s to 1h")
    return value


def _retained(value: float) -> float:
    if not 1.0 <= value < 2**32 - 1:
        raise ValueError("expected a duration from 1s to 136y")
    return value


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ConsumerSettings(_Settings):
    """What every kind has: `send` says which results it gets, `start` with which a new one begins."""

    send: Annotated[list[Kind], Field(min_length=1)] = ["boards", "inspections"]
    start: Literal["oldest", "newest"] = "oldest"


class Tls(_Settings):
    """`ca` is the file with the broker's authority, the system's own where it is left out; `cert` and `key` are ours.

    A broker's name is always checked against its certificate.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class MqttSettings(ConsumerSettings):
    """A broker that speaks MQTT 5. `retain_boards` is how long it keeps the state of a board for late subscribers.

    `password` is a file that only the daemon reads. `client` is our identifier there, by default one that stays the
    same for this consumer of this line.
    """

    kind: Literal["mqtt"]
    host: Annotated[str, AfterValidator(_host)]
    port: Annotated[int, Field(ge=1, le=65535)] = 1883
    prefix: Annotated[str, AfterValidator(_prefix)] = "coserve"
    user: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    password: Path | None = None
    tls: Tls | None = None
    client: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    keepalive: Annotated[Seconds, AfterValidator(_keepalive)] = 30.0
    retain_boards: Annotated[Seconds, AfterValidator(_retained)] | None = 30 * 86400.0

    def files(self) -> dict[tuple[str, ...], Path]:
        """What it names, by the key that names it."""
        named: dict[tuple[str, ...], Path | None] = {("password",): self.password}
        if self.tls is not None:
            named |= {("tls", "ca"): self.tls.ca, ("tls", "cert"): self.tls.cert, ("tls", "key"): self.tls.key}
        return {key: file for key, file in named.items() if file is not None}

    def resolved(self, place: Callable[[Path], Path]) -> Self:
        """The same with `place` for each file that it names."""
        files = {key: place(file) for key, file in self.files().items()}
        tls = self.tls and self.tls.model_copy(update={key[1]: file for key, file in files.items() if key[0] == "tls"})
        return self.model_copy(update={"password": files.get(("password",)), "tls": tls})


def consumer_mistakes(consumers: Mapping[str, MqttSettings]) -> list[tuple[tuple[str, ...], str]]:
    """What cannot be so whatever the files hold, each with the key that is wrong, the consumer's name before it."""
    found: list[tuple[tuple[str, ...], str]] = []
    places: dict[tuple[str, int, str], str] = {}
    for name, one in consumers.items():
        if one.password is not None and one.user is None:
            found.append(((name, "password"), "needs `user`, whose password it is"))
        if one.tls and (one.tls.cert is None) != (one.tls.key is None):
            message = "needs both `cert` and `key` where the broker asks for a certificate, or neither"
            found.append(((name, "tls"), message))
        first = places.setdefault((one.host, one.port, one.prefix), name)
        if first != name:
            found.append(((name, "prefix"), f"{one.prefix} is that of {first} at the same broker: each needs its own"))
    return found
