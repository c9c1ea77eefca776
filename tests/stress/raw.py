"""ZMTP 3.0 by hand over a plain socket, for peers that stop in the middle or send bytes that libzmq never would."""

import contextlib
import socket
from typing import Self

#: Signature, version 3.0, mechanism NULL, not a server, filler: 64 bytes.
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_LONG, _COMMAND = 2, 4


def _ready(kind: bytes) -> bytes:
    """Return the command that ends the handshake."""
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return bytes([_COMMAND, len(body)]) + body


def frame(body: bytes, *, more: bool) -> bytes:
    """Return one frame as it goes over the line."""
    return frame_head(len(body), more=more) + body


def frame_head(size_bytes: int, *, more: bool) -> bytes:
    """Return the head of a frame that announces `size_bytes`; the body may come or not."""
    if size_bytes > 255:
        return bytes([_LONG | more]) + size_bytes.to_bytes(8, "big")
    return bytes([int(more), size_bytes])


class RawPeer:
    """A connection to `ipc://…` or `tcp://host:port`; the daemon's bytes after the handshake are left unread."""

    def __init__(self, endpoint: str) -> None:
        scheme, _, address = endpoint.partition("://")
        host, _, port = address.rpartition(":")
        is_ipc = scheme == "ipc"
        self.socket = socket.socket(socket.AF_UNIX if is_ipc else socket.AF_INET, socket.SOCK_STREAM)
        self.socket.settimeout(5.0)
        try:
            self.socket.connect(address if is_ipc else (host, int(port)))
        except OSError:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def greet(self, kind: bytes = b"DEALER") -> Self:
        """Finish the handshake as a socket of this kind, so that frames may follow."""
        with contextlib.suppress(OSError):  # libzmq ends a connection whose handshake comes before it has answered
            self.socket.sendall(GREETING)
            self.socket.recv(len(GREETING), socket.MSG_WAITALL)
            self.socket.sendall(_ready(kind))
            self.socket.recv(1)
        return self

    def send(self, data: bytes) -> bool:
        """Return False if the daemon has closed the connection, or takes no more."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def is_cut(self, wait_s: float = 0.0) -> bool:
        """Return True if the daemon has closed the connection; reads and drops the bytes that came."""
        self.socket.settimeout(max(wait_s, 0.001))
        try:
            while self.socket.recv(65536):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        else:
            return True
        finally:
            with contextlib.suppress(OSError):
                self.socket.settimeout(5.0)

    def close(self) -> None:
        self.socket.close()
