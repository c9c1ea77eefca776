"""What a consumer shows to be let in, from files that only the daemon reads; read anew for each connection."""

import ssl
from pathlib import Path

from daemon.consumers.settings import MqttSettings, Tls
from daemon.wire.keys import open_to

_MAX_PASSWORD_BYTES = 65_535  # MQTT 5, 3.1.3.6


class CredentialError(Exception):
    """A file that cannot be used; the text says which, why and what to do, and never what is in it."""


def read_password(file: Path) -> str:
    """The password in `file`, its first line, which nobody else can read."""
    _must_be_private(file)
    try:
        text = file.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise CredentialError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CredentialError(f"{file} holds no password: it is not UTF-8 text") from None
    if not text or "\n" in text or len(text.encode()) > _MAX_PASSWORD_BYTES:
        raise CredentialError(f"{file} holds no password: expected one line")
    return text


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Checks the broker's name and authority, and shows our certificate where there is one."""
    try:
        context = ssl.create_default_context(cafile=tls.ca)
    except OSError as error:  # ssl.SSLError is one
        expected = "expected certificates of authorities as PEM"
        raise CredentialError(f"{tls.ca} cannot be used: {error.strerror or error}: {expected}") from None
    if tls.cert is not None and tls.key is not None:
        _must_be_private(tls.key)
        for file in (tls.cert, tls.key):
            _must_be_readable(file)
        try:
            context.load_cert_chain(tls.cert, tls.key, password="")  # with None OpenSSL asks the terminal
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            expected = "expected a certificate and its key as PEM, the key without a passphrase"
            raise CredentialError(f"{tls.cert} and {tls.key} cannot be used: {why}: {expected}") from None
    return context


def credential_problems(settings: MqttSettings) -> list[tuple[tuple[str, ...], str]]:
    """What is wrong with the files that `settings` names, each with the key that names it."""
    found: list[tuple[tuple[str, ...], str]] = []
    try:
        if settings.password is not None:
            read_password(settings.password)
    except CredentialError as error:
        found.append((("password",), str(error)))
    try:
        if settings.tls is not None:
            tls_context(settings.tls)
    except CredentialError as error:
        # The key whose file the text begins with.
        named = (key for key, file in settings.files().items() if key[0] == "tls" and str(error).startswith(str(file)))
        found.append((next(named, ("tls",)), str(error)))
    return found


def _must_be_private(file: Path) -> None:
    try:
        readers = open_to(file)
    except OSError as error:
        raise CredentialError(f"{file} cannot be read: {error.strerror}") from None
    if readers:
        raise CredentialError(f"{file} can be read by {readers}: chmod 600 it, and replace its content if it was read")


def _must_be_readable(file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as error:
        raise CredentialError(f"{file} cannot be read: {error.strerror}") from None
