"""Secrets in files: CURVE keys of the daemon and of allowed clients, passwords, and the bearer token of HTTP.

The files are pyzmq's (zmq.auth certificates): `NAME.key` is public, `NAME.key_secret` is not.
"""

import hashlib
import hmac
import os
import re
import stat
import struct
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import zmq.auth
from zmq.utils import z85

from daemon.wire.sockets import ServerKeys
from experts.durable import replace_durably, sync

_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ACL = "system.posix_acl_access"
_ACL_OPENS = {0x04: "its group", 0x08: "a group", 0x20: "everybody"}


class KeyFileError(Exception):
    """A key or a key file that cannot be used; the text says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class AllowList:
    """Names of clients by public key (Z85), and the problems of unusable files."""

    clients: dict[str, str]
    problems: tuple[str, ...] = ()


def fingerprint(public: str) -> str:
    """Format a public key for people: 16 hex digits of its SHA-256 in groups of four."""
    digits = hashlib.sha256(z85.decode(public.encode("ascii"))).hexdigest()[:16]
    return " ".join(digits[start : start + 4] for start in range(0, 16, 4))


def open_to(path: Path) -> str | None:
    """Return who may read `path` beside its owner (and users of an access list, as systemd's credentials have them)."""
    try:
        entries = list(struct.iter_unpack("<HHI", os.getxattr(path, _ACL)[4:]))
    except OSError:
        entries = []  # no access list: the mode says it all
    if entries:
        return next((_ACL_OPENS[tag] for tag, may, _ in entries if may and tag in _ACL_OPENS), None)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o007:
        return "everybody"
    return "its group" if mode & 0o070 else None


def read_server_keys(file: Path) -> ServerKeys:
    """Return the pair in a `.key_secret` file; KeyFileError if others can read the file, or it is wrong."""
    public, secret = _load(file)
    if secret is None:
        raise KeyFileError(f"{file} has no secret key: name the .key_secret file")
    readers = open_to(file)
    if readers:
        raise KeyFileError(f"{file} can be read by {readers}: chmod 600 it, and make new keys if it was read")
    return ServerKeys(_checked(public, file).encode(), _checked(secret, file).encode())


def read_public_key(file: Path) -> str:
    public, secret = _load(file)
    if secret is not None:
        raise KeyFileError(f"{file} has the client's secret key, which stays with the client: name its .key file")
    return _checked(public, file)


def checked_key(text: str) -> str:
    """Return a public key that was typed or pasted: 40 characters of Z85."""
    return _checked(text.encode("utf-8", "replace"), "the key")


def read_allow_list(folder: Path) -> AllowList:
    """Return the clients of all `.key` files; unusable ones are problems. OSError if `folder` is unreadable."""
    clients: dict[str, str] = {}
    problems: list[str] = []
    for file in sorted(path for path in folder.iterdir() if path.suffix == ".key"):
        try:
            key = read_public_key(file)
        except KeyFileError as error:
            problems.append(str(error))
            continue
        first = clients.setdefault(key, file.stem)
        if first != file.stem:
            problems.append(f"{file} has the same key as {first}.key: a client has one name, take one of the files out")
    return AllowList(clients, tuple(problems))


def make_key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Make `NAME.key` and `NAME.key_secret` (mode 0600) in `folder`; KeyFileError if either exists already."""
    check_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / f"{name}.key", folder / f"{name}.key_secret"
    with tempfile.TemporaryDirectory(prefix=".keys-", dir=folder) as hidden:  # mode 0700
        made_files = [Path(file) for file in zmq.auth.create_certificates(hidden, name)]
        for place, file, mode in zip(files, made_files, (0o644, 0o600), strict=True):
            file.chmod(mode)
            if place.exists():
                raise KeyFileError(f"{place} exists already: name another key, or move that one away first")
        for place, file in zip(reversed(files), reversed(made_files), strict=True):
            try:
                os.link(file, place)  # unlike a rename, it never replaces
            except FileExistsError:
                raise KeyFileError(f"{place} exists already: name another key, or move that one away first") from None
    return files


def allow(folder: Path, name: str, public: str) -> Path:
    """Put `public` into the allow-list as `name`; a second time changes nothing. KeyFileError if either is taken."""
    check_name(name)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    place = folder / f"{name}.key"
    other_name = read_allow_list(folder).clients.get(public)
    if other_name == name:
        return place
    if other_name is not None:
        raise KeyFileError(f"this key is allowed already, as {other_name}: a client has one name")
    if place.exists():
        raise KeyFileError(f"{place} exists already with another key: coserve keys revoke {name} first")
    text = f'# CoServe: {name} may come in\nmetadata\ncurve\n    public-key = "{public}"\n'
    replace_durably(place, text, mode=0o644)
    return place


def revoke(folder: Path, name: str) -> list[str]:
    """Remove `name`, under every name of its key, and return the removed names. KeyFileError if absent."""
    check_name(name)
    place = folder / f"{name}.key"
    if not place.exists():
        names = ", ".join(sorted(file.stem for file in folder.glob("*.key")))
        raise KeyFileError(f"{name} is not allowed in; allowed are: {names or 'none'}")
    key = _key_in(place)
    same = [file for file in folder.glob("*.key") if file == place or (key is not None and _key_in(file) == key)]
    for file in same:
        file.unlink(missing_ok=True)
    sync(folder)  # a power cut must not let a revoked client in again
    return sorted(file.stem for file in same)


def _key_in(file: Path) -> str | None:
    try:
        return read_public_key(file)
    except KeyFileError:
        return None


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise KeyFileError(
            f"{name!r} is not a name for a key: use letters, digits, dot, dash and underscore, at most 64"
        )


def _load(file: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(file)
    except PermissionError:
        raise KeyFileError(f"{file} may not be opened by this user: give it to the daemon's user, mode 0600") from None
    except (OSError, ValueError, IndexError) as error:
        if not file.is_file():  # zmq would call this an invalid certificate
            raise KeyFileError(f"there is no file {file}: put the key there, or make one: coserve keys new") from None
        raise KeyFileError(f"{file} is not a key file: {error}") from None


def _checked(key: bytes, what: object) -> str:
    """Return `key` as text if it is Z85 of 32 bytes. The error never quotes the key: it may be a secret one."""
    try:
        size = len(z85.decode(key))
    except (ValueError, KeyError, struct.error):
        size = 0
    if size != _KEY_BYTES:
        raise KeyFileError(f"{what} is not a key: expected 40 characters of Z85, as coserve keys new writes them")
    return key.decode("ascii")


_MIN_CHARS = 32
_MAX_PASSWORD_BYTES = 65_535  # MQTT 5, 3.1.3.6
_Key = TypeVar("_Key")


class CredentialError(Exception):
    """A secret file that cannot be used; the text says which, why, and what to do, and never what is in it."""


def unusable(secrets: Iterable[tuple[_Key, Path | None, Callable[[Path], object]]]) -> list[tuple[_Key, str]]:
    """Return why secrets cannot be used, each with its key. A secret: its key, its file if it is named, its reader."""
    problems: list[tuple[_Key, str]] = []
    for key, file, read in secrets:
        try:
            if file is not None:
                read(file)
        except CredentialError as error:
            problems.append((key, str(error)))
    return problems


def require_private(file: Path) -> None:
    """CredentialError if anyone but its owner can read `file`."""
    try:
        readers = open_to(file)
    except OSError as error:
        raise CredentialError(f"{file} cannot be read: {error.strerror}") from None
    if readers:
        raise CredentialError(f"{file} can be read by {readers}: chmod 600 it, and replace its content if it was read")


def read_password(file: Path) -> str:
    """Return the password, the only line of `file`; CredentialError if others can read it, or it has another form."""
    require_private(file)
    try:
        text = file.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise CredentialError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CredentialError(f"{file} does not hold a password: it is not UTF-8 text") from None
    if not text or "\n" in text or len(text.encode()) > _MAX_PASSWORD_BYTES:
        raise CredentialError(f"{file} does not hold a password: expected one line of 1 to {_MAX_PASSWORD_BYTES} bytes")
    return text


class Token:
    """A secret. It has no text of its own, so that no log and no traceback can show it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def matches(self, authorization: str) -> bool:
        scheme, _, secret = authorization.partition(" ")
        is_equal = hmac.compare_digest(secret.strip().encode("utf-8", "replace"), self._secret)
        return is_equal and scheme.lower() == "bearer"

    def sign(self, text: str) -> str:
        """Sign `text`: only a holder of this token can, and the signature does not reveal it."""
        return hmac.new(self._secret, text.encode("utf-8", "replace"), "sha256").hexdigest()


def no_token_text(authorization: str) -> str:
    scheme, _, secret = authorization.partition(" ")
    is_wrong = scheme.lower() == "bearer" and secret.strip()
    return "this token is not the line's" if is_wrong else "a bearer token is needed"


def read_token(file: Path) -> Token:
    try:
        secret = file.read_bytes().strip()
        readers = open_to(file)
    except OSError as error:
        raise CredentialError(f"{file} cannot be read: {error.strerror}") from None
    mistakes: list[str] = []
    if readers:
        mistakes.append(f"{file} can be read by {readers}: chmod 600 it, and make a new token if it was read")
    if len(secret) < _MIN_CHARS or not secret.isascii() or any(byte <= 32 or byte == 127 for byte in secret):
        example = f"for example: (umask 077; openssl rand -hex 32 > {file})"
        mistakes.append(
            f"{file} holds no token: expected one line of at least {_MIN_CHARS} ASCII characters, {example}"
        )
    if mistakes:
        raise CredentialError("; and ".join(mistakes))
    return Token(secret)
