"""Ed25519 signatures of packages and releases: PEM keys and base64 signatures, which openssl alone can check."""

import base64
import hashlib
from pathlib import Path
from typing import TypeAlias

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from daemon.wire.keys import KeyFileError, check_name, open_to
from experts.durable import replace_durably

SIGNATURE = "SIGNATURE"
_SIGNATURE_BYTES = 64
#: The types of keys, for rooms that do not import `cryptography`.
PublicKey: TypeAlias = Ed25519PublicKey
SecretKey: TypeAlias = Ed25519PrivateKey


def make_signing_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Make `NAME.sign` (public) and `NAME.sign_secret` (mode 0600) in `folder`; KeyFileError if either exists."""
    check_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    key = Ed25519PrivateKey.generate()
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    files = folder / f"{name}.sign", folder / f"{name}.sign_secret"
    for file in files:
        if file.exists():
            raise KeyFileError(f"{file} exists already: name another key, or move that one away first")
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    replace_durably(files[1], secret, 0o600)
    replace_durably(files[0], public, 0o644)
    return files


def read_signing_key(file: Path) -> Ed25519PrivateKey:
    """Read a `.sign_secret` file; KeyFileError if others can read it, or it is not a secret key for signing."""
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(
            f"{file} is not a secret Ed25519 key: name the .sign_secret file that `coserve keys new NAME --sign` made"
        )
    readers = open_to(file)
    if readers:
        raise KeyFileError(f"{file} can be read by {readers}: chmod 600 it, and make a new pair if it was read")
    return key


def read_public_key(file: Path) -> Ed25519PublicKey:
    """Read a `.sign` file; KeyFileError if it is not a public key for signing."""
    try:
        key = serialization.load_pem_public_key(file.read_bytes())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise KeyFileError(
            f"{file} is not a public Ed25519 key: name the .sign file that `coserve keys new NAME --sign` made"
        )
    return key


def key_id(key: Ed25519PublicKey) -> str:
    """Return a key's name for people: 16 hex digits of the sha256 of its bytes, in groups of four."""
    digits = hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]
    return " ".join(digits[start : start + 4] for start in range(0, 16, 4))


def signature_of(data: bytes, key: Ed25519PrivateKey) -> str:
    return f"{base64.b64encode(key.sign(data)).decode()}\n"


def sign(file: Path, key: Ed25519PrivateKey) -> None:
    file.with_name(SIGNATURE).write_text(signature_of(file.read_bytes(), key), encoding="ascii")


def signature_bytes(text: bytes) -> bytes | None:
    """Decode a line of base64; None if it is not a complete signature."""
    try:
        signature = base64.b64decode(text.strip(), validate=True)
    except ValueError:
        return None
    return signature if len(signature) == _SIGNATURE_BYTES else None


def is_signed_by(data: bytes, signature: bytes, key: Ed25519PublicKey) -> bool:
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def signature_problem(file: Path, key: Ed25519PublicKey, signed_by: str | None) -> str | None:
    place = file.with_name(SIGNATURE)
    if place.is_symlink() or not place.is_file():
        return f"it is not signed: it has no {SIGNATURE}"
    signature = signature_bytes(place.read_bytes())
    if signature is None:
        return f"{SIGNATURE} is cut off or changed: expected the {_SIGNATURE_BYTES} bytes of a signature in base64"
    if is_signed_by(file.read_bytes(), signature, key):
        return None
    if signed_by not in (None, key_id(key)):
        return f"it names {signed_by} as its key, and the given key is {key_id(key)}: it was signed with another key"
    return f"{file.name} or {SIGNATURE} was changed after signing: the signature does not fit the key {key_id(key)}"
