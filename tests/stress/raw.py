"""ZMTP 3.0 spoken by hand over a plain socket: for peers that stop in the middle, or say what libzmq never would."""

import contextlib
import socket
from types import TracebackType
from typing import Self

#: Signature, version 3.0, mechanism NULL, not a server, filler: 64 bytes.
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_MORE, _LONG, _COMMAND = 1, 2, 4


def ready(socket_type: bytes = b"DEALER") -> bytes:
    """The command that ends the handshake."""
    body = b"\x05READY" + b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    return bytes([_COMMAND, len(body)]) + body


def frame(body: bytes, *, more: bool) -> bytes:
    """One frame as it goes over the line."""
    return frame_head(len(body), more=more) + body


def frame_head(size_bytes: int, *, more: bool) -> bytes:
    """The head of a frame that says it has `size_bytes`; the body may come or not."""
    if size_bytes > 255:
        return bytes([_LONG | more]) + size_bytes.to_bytes(8, "big")
    return bytes([int(more), size_bytes])


class RawPeer:
    """A connection to `ipc://…` or `tcp://host:port`; what the daemon sends is left unread."""

    def __init__(self, endpoint: str) -> None:
        scheme, _, address = endpoint.partition("://")
        family = socket.AF_UNIX if scheme == "ipc" else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.settimeout(5.0)
        try:
            if scheme == "ipc":
                self.socket.connect(address)
            else:
                host, _, port = address.rpartition(":")
                self.socket.connect((host, int(port)))
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def greet(self, socket_type: bytes = b"DEALER") -> Self:
        """The whole handshake, so that frames may follow."""
        self.send(GREETING + ready(socket_type))
        return self

    def send(self, data: bytes) -> bool:
        """False where the daemon has closed the connection, or takes no more."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def is_cut(self, wait_s: float = 0.0) -> bool:
        """Whether the daemon has closed the connection; reads and forgets what came."""
        self.socket.settimeout(max(wait_s, 0.001))
        try:
            while data := self.socket.recv(65536):
                del data
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
