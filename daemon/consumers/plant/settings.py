"""The settings of a line's connection to its plant's hub."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from daemon.consumers.protocol import Consumer, ConsumerSettings, KeyedTexts, LineAccess, SecretFiles
from daemon.units import parse_bytes
from daemon.wire.keys import read_password, read_token
from daemon.wire.sockets import is_open_host

#: A line's name at the hub: in URLs, tables and files.
LINE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_DATABASE = r"postgresql(?:\+psycopg)?://((?:[^@/]+@)?{hosts}/[^@/?]+(?:\?[^@]*)?)"
#: Hosts and ports as libpq reads them, which may be several; and one as SQLAlchemy does.
_HOSTS, ONE_HOST = r"[^@/?]*", r"(?:[^@/:?\[\]]*|\[[^@/\]]*\])(?::\d{1,5})?"
#: libpq's settings, in s (`tcp_user_timeout` in ms): each side notices within some 15 s that the other is cut off.
TIMEOUTS = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 15_000,
}


def line_name(value: str) -> str:
    if re.fullmatch(LINE_NAME, value) is None:
        raise ValueError(f"expected a name such as line-3: letters, digits and . _ - (64 at most), not {value!r}")
    return value


def hub_database(value: str, scheme: str = "postgresql", hosts: str = _HOSTS) -> str:
    """Check the address of a hub's database. Errors do not repeat it, for it may hold a password."""
    address = re.fullmatch(_DATABASE.format(hosts=hosts), value)
    if address is None:
        raise ValueError(
            "expected postgresql://USER@HOST:PORT/DATABASE, or postgresql://USER@/DATABASE?host=/run/postgresql: the"
            " hub needs PostgreSQL; percent-encode all but letters and digits in a password"
        )
    return f"{scheme}://{address[1]}"


def _hub(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"expected the hub's address such as http://hub.plant.lan:9480, not {value!r}")
    return value.rstrip("/")


def _rate(value: object) -> int:
    if not isinstance(value, str) or not value.endswith("/s"):
        raise ValueError(f"expected bytes per second such as 2MB/s, not {value!r}")
    return parse_bytes(value.removesuffix("/s"))


class PlantSettings(ConsumerSettings):
    extra: ClassVar[tuple[str, str, str] | None] = ("plant", "psycopg", "a consumer writes to a plant's hub")
    secret_files: ClassVar[SecretFiles] = {("password",): read_password, ("key",): read_token}
    batch: ClassVar[int] = 1000

    kind: Literal["plant"]  # type: ignore[assignment]
    database: Annotated[str, AfterValidator(hub_database)]
    password: Path | None = None
    hub: Annotated[str, AfterValidator(_hub)] | None = None
    key: Path | None = None
    pictures: Literal["none", "failed", "reviewed"] = "none"
    bandwidth: Annotated[int, BeforeValidator(_rate), Field(gt=0)] = 2_000_000

    def make(self, identifier: str, line: LineAccess) -> Consumer:
        from daemon.consumers.plant.consumer import PlantConsumer  # noqa: PLC0415 - of the extra `plant`

        return PlantConsumer(self, identifier, line)

    def servers(self) -> list[tuple[str, int]]:
        database = urlsplit(self.database)
        servers = [(database.hostname, database.port or 5432)] if database.hostname else []
        if self.hub is not None:
            hub = urlsplit(self.hub)
            servers.append((hub.hostname or "", hub.port or (443 if hub.scheme == "https" else 80)))
        return servers

    def mistakes(self, line: str, others: Mapping[str, ConsumerSettings]) -> KeyedTexts:
        mistakes: KeyedTexts = []
        if re.fullmatch(LINE_NAME, line) is None:
            text = f"a hub takes names such as line-3 (letters, digits and . _ -), not {line!r}: set the line's `line`"
            mistakes.append((("kind",), text))
        if "generations" in self.send:
            mistakes.append((("send",), "a hub takes boards, inspections and reviews: remove generations"))
        if self.pictures != "none" and (self.hub is None or self.key is None):
            mistakes.append((("pictures",), "needs `hub`, its address, and `key`, the file with this line's key there"))
        for name, other in others.items():
            if isinstance(other, PlantSettings) and other.database == self.database:
                mistakes.append((("database",), f"is that of {name} too: one of them is enough"))
        return mistakes

    def warnings(self) -> KeyedTexts:
        if self.key is not None and self.hub is not None:
            parts = urlsplit(self.hub)
            if parts.scheme == "http" and is_open_host(parts.hostname or ""):
                return [(("key",), "crosses the network unencrypted: put a proxy with TLS before the hub, https://…")]
        return []
