"""The bearer token of the HTTP endpoint: a file that only the daemon reads, compared in constant time."""

import hmac
from pathlib import Path

from daemon.wire.keys import open_to

_MIN_CHARS = 32


class TokenError(Exception):
    """A token file that cannot be used; the text says which, why, and what to do, and never what is in it."""


class Token:
    """A secret. It has no text of its own, so that no log and no traceback can show it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def matches(self, authorization: str) -> bool:
        """Whether an `Authorization` header carries this token."""
        scheme, _, given = authorization.partition(" ")
        is_equal = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._secret)
        return is_equal and scheme.lower() == "bearer"

    def sign(self, text: str) -> str:
        """A mark under `text` that only this token's holder can make, and that does not tell the token."""
        return hmac.new(self._secret, text.encode("utf-8", "replace"), "sha256").hexdigest()


def no_token_text(authorization: str) -> str:
    """What a program hears whose `Authorization` header, empty for none, does not let it in."""
    scheme, _, given = authorization.partition(" ")
    is_wrong = scheme.lower() == "bearer" and given.strip()
    return "this token is not the line's" if is_wrong else "a bearer token is needed"


def read_token(file: Path) -> Token:
    """The token in `file`, which nobody else can read; TokenError otherwise."""
    try:
        secret = file.read_bytes().strip()
        readers = open_to(file)
    except OSError as error:
        raise TokenError(f"{file} cannot be read: {error.strerror}") from None
    mistakes: list[str] = []
    if readers:
        mistakes.append(f"{file} can be read by {readers}: chmod 600 it, and make a new token if it was read")
    if len(secret) < _MIN_CHARS or not secret.isascii() or any(byte <= 32 or byte == 127 for byte in secret):
        made = f"for example: (umask 077; openssl rand -hex 32 > {file})"
        mistakes.append(f"{file} holds no token: expected one line of at least {_MIN_CHARS} ASCII characters, {made}")
    if mistakes:
        raise TokenError("; and ".join(mistakes))
    return Token(secret)
