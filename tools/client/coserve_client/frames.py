"""The outside of every message (PROTOCOL.md, Frames), and the connection that carries it.

A message is the frame `CS1`, a header of one JSON object, and for an image its bytes. The daemon reads headers more
strictly than a client has to (daemon/wire/messages.py); both write them with `encode`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth

MAGIC = b"CS1"
MAX_HEADER_BYTES = 64 * 1024

#: Legal values of `id` and `source`. An answer repeats them only where they are legal.
KEY = re.compile(r"[A-Za-z0-9._:/-]{1,128}")

#: One encoder for all messages: `json.dumps` makes a new one for each call.
_COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class CoserveError(Exception):
    """The base of all errors of this package; the text says what to do."""


@dataclass(frozen=True, slots=True)
class CurveClient:
    """Key files for a line on another PC: the daemon's public key, and the client's own secret one."""

    server_public_key: Path
    client_secret_key: Path

    def load(self) -> tuple[bytes, bytes, bytes]:
        """Return the server's public key, and the client's public and secret one; CoserveError if that is missing."""
        server, _ = _load_key(self.server_public_key)
        public, secret = _load_key(self.client_secret_key)
        if secret is None:
            raise CoserveError(f"{self.client_secret_key} has no secret key: name the .key_secret file")
        return server, public, secret


def _load_key(file: Path) -> tuple[bytes, bytes | None]:
    return zmq.auth.load_certificate(file)  # pyright: ignore[reportUnknownMemberType] - pyzmq's own gap


def encode(body: Mapping[str, Any]) -> bytes:
    """Return `body` as the compact JSON of one frame. ASCII, so that no text from outside can make it invalid."""
    return _COMPACT.encode(body).encode("ascii")


def connect(context: "zmq.Context[Any]", kind: int, endpoint: str, curve: CurveClient | None) -> "zmq.Socket[bytes]":
    """Return a socket that connects to `endpoint`, now or when a daemon is there; CoserveError for a wrong key file."""
    keys = None if curve is None else curve.load()
    connection: zmq.Socket[bytes] = context.socket(kind)
    connection.linger = 0
    connection.sndhwm = 0  # the daemon's credit is the limit
    if keys is not None:
        connection.curve_serverkey, connection.curve_publickey, connection.curve_secretkey = keys
    connection.connect(endpoint)
    return connection


def silence_text(endpoint: str, silent_s: float, curve: CurveClient | None) -> str:
    """Return a sentence on a daemon that does not answer, with what a person can check."""
    text = (
        f"no answer from {endpoint} for {silent_s:.3g} s: is the daemon running, and is this the endpoint in its "
        f"configuration?"
    )
    if curve is not None:  # a client that is not on the list gets no answer at all
        text += " Does `coserve keys list` there name this client, and is its server key the one that is used here?"
    return text
