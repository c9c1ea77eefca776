"""The settings of an MQTT broker, and the certificates that they name, read again for each connection."""

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from daemon.consumers.protocol import Consumer, ConsumerSettings, KeyedTexts, LineAccess, SecretFiles
from daemon.units import Seconds, between
from daemon.wire.keys import CredentialError, read_password, require_private
from daemon.wire.sockets import is_open_host

#: A name or an IPv4 address, or an IPv6 address in brackets if a port follows it.
_HOST = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(\d{1,5}))?|([0-9A-Fa-f:.]{2,45})")


def _host(value: str) -> str:
    given = _HOST.fullmatch(value)
    if given is None or not 1 <= int(given[2] or 1) <= 65535:
        raise ValueError(f"expected a host such as broker.plant.lan, 192.0.2.7 or [2001:db8::7]:8883, not {value!r}")
    return value


def _prefix(value: str) -> str:
    """Check the first levels of the topics (MQTT 5, 4.7)."""
    if re.fullmatch(r"[^\x00-\x1f\x7f+#$/][^\x00-\x1f\x7f+#/]*(/[^\x00-\x1f\x7f+#/]+)*", value) is None:
        raise ValueError(f"expected topic levels such as plant-1/line-2, without + # or an empty level, not {value!r}")
    if len(value.encode()) > 1024:
        raise ValueError("expected a prefix of 1024 bytes at most")
    return value


class Tls(BaseModel):
    """`ca` is the file with the broker's authority, by default the system's own; `cert` and `key` are ours."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class MqttSettings(ConsumerSettings):
    """A broker that speaks MQTT 5; `retain_boards` is how long it keeps states."""

    extra: ClassVar[tuple[str, str, str] | None] = ("mqtt", "paho", "a consumer speaks MQTT")
    secret_files: ClassVar[SecretFiles] = {("password",): read_password, ("tls", "key"): require_private}
    repeats_boards: ClassVar[bool] = True

    kind: Literal["mqtt"]  # type: ignore[assignment]
    host: Annotated[str, AfterValidator(_host)]
    prefix: Annotated[str, AfterValidator(_prefix)] = "coserve"
    user: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    password: Path | None = None
    tls: Tls | None = None
    retain_boards: Annotated[Seconds, between(1.0, 2**32 - 2, "from 1s to 136y")] | None = 30 * 86400.0

    def make(self, identifier: str, line: LineAccess) -> Consumer:
        from daemon.consumers.mqtt.consumer import Mqtt  # noqa: PLC0415 - of the extra `mqtt`

        return Mqtt(self, identifier, line.alarms)

    @property
    def server(self) -> tuple[str, int]:
        given = _HOST.fullmatch(self.host)
        assert given is not None
        return (given[1] or given[3]).strip("[]"), int(given[2] or (8883 if self.tls else 1883))

    def servers(self) -> list[tuple[str, int]]:
        return [self.server]

    def mistakes(self, line: str, others: Mapping[str, ConsumerSettings]) -> KeyedTexts:
        del line
        mistakes: KeyedTexts = []
        if self.password is not None and self.user is None:
            mistakes.append((("password",), "needs `user`, whose password it is"))
        if self.tls and (self.tls.cert is None) != (self.tls.key is None):
            mistakes.append((("tls",), "needs both `cert` and `key` if the broker asks for a certificate, or neither"))
        for name, other in others.items():
            if isinstance(other, MqttSettings) and other._topics() == self._topics():
                text = f"{self.prefix} is that of {name} at the same broker: each needs its own"
                return [*mistakes, (("prefix",), text)]
        return mistakes

    def file_problems(self) -> KeyedTexts:
        problems = super().file_problems()
        try:
            if self.tls is not None:
                tls_context(self.tls)
        except CredentialError as error:
            # The message begins with the file: find the key that names it.
            files = {key: file for key, file in self.files().items() if key[0] == "tls"}
            keys = (key for key, file in files.items() if str(error).startswith(str(file)))
            problems.append((next(keys, ("tls",)), str(error)))
        return list(dict.fromkeys(problems))

    def warnings(self) -> KeyedTexts:
        if self.password is not None and self.tls is None and is_open_host(self.server[0]):
            return [(("password",), "crosses the network unencrypted: add `tls: {}`")]
        return []

    def _topics(self) -> tuple[tuple[str, int], str]:
        return self.server, self.prefix


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return a context that checks the broker's name and authority, and shows our certificate if there is one."""
    try:
        context = ssl.create_default_context(cafile=tls.ca)
    except OSError as error:  # ssl.SSLError is one
        expected = "expected certificates of authorities as PEM"
        raise CredentialError(f"{tls.ca} cannot be used: {error.strerror or error}: {expected}") from None
    if tls.cert is not None and tls.key is not None:
        require_private(tls.key)
        for file in (tls.cert, tls.key):
            try:
                file.open("rb").close()
            except OSError as error:
                raise CredentialError(f"{file} cannot be read: {error.strerror}") from None
        try:
            context.load_cert_chain(tls.cert, tls.key, password="")  # with None OpenSSL asks the terminal
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            expected = "expected a certificate and its key as PEM, the key without a passphrase"
            raise CredentialError(f"{tls.cert} and {tls.key} cannot be used: {why}: {expected}") from None
    return context
