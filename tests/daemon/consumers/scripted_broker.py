"""A broker that misbehaves on purpose, with the part of MQTT 5 that this takes."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

CONNECT, PUBLISH, PINGREQ = 1, 3, 12
#: For each message its number among those of this connection; the reason code of its answer, or None for no answer.
Answer = Callable[[int], int | None]


class ScriptedBroker:
    """Takes connections one after the other. `connack` is the reason code, None for silence, "close" to hang up."""

    def __init__(
        self,
        connack: int | str | None = 0,
        answer: Answer = lambda _: 0,
        close_after: int | None = None,
        receive_maximum: int | None = None,
        flood: bytes | None = None,
    ) -> None:
        """`flood` is sent right after the answer to CONNECT, which is left out where `connack` is None."""
        self.flood, self.flooded_bytes = flood, 0
        self.connack, self.answer = connack, answer
        self.close_after, self.receive_maximum = close_after, receive_maximum
        self.connections = 0
        self.topics: list[str] = []
        self.max_unanswered = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.hang_up()
        self._thread.join(60)

    def hang_up(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        published: list[bytes] = []
        unanswered: list[bytes] = []
        with connection, contextlib.suppress(OSError, EOFError):
            while True:
                kind, body = _packet(connection)
                if kind == CONNECT and self.connack is not None:
                    if self.connack == "close":
                        return
                    connection.sendall(self._connack(int(self.connack)))
                if kind == CONNECT and (flood := self.flood) is not None:
                    connection.settimeout(60)
                    for place in range(0, len(flood), 65536):
                        connection.sendall(flood[place : place + 65536])
                        self.flooded_bytes = max(self.flooded_bytes, place)
                elif kind == PINGREQ:
                    connection.sendall(b"\xd0\x00")
                elif kind == PUBLISH:
                    size = int.from_bytes(body[:2], "big")
                    self.topics.append(body[2 : 2 + size].decode())
                    published.append(body[2 + size : 4 + size])
                    if self.close_after is not None and len(published) > self.close_after:
                        return
                    unanswered.append(published[-1])
                    self.max_unanswered = max(self.max_unanswered, len(unanswered))
                    if self.receive_maximum is None or not _has_more(connection):
                        self._confirm(connection, unanswered, len(published))

    def _confirm(self, connection: socket.socket, unanswered: list[bytes], number: int) -> None:
        for packet in unanswered:
            if (code := self.answer(number)) is not None:
                connection.sendall(b"\x40\x04" + packet + bytes([code, 0]))
        unanswered.clear()

    def _connack(self, code: int) -> bytes:
        properties = b"" if self.receive_maximum is None else b"\x21" + self.receive_maximum.to_bytes(2, "big")
        body = bytes([0, code, len(properties)]) + properties
        return b"\x20" + bytes([len(body)]) + body


def _has_more(connection: socket.socket) -> bool:
    """Return True if more has come; a client that sends more than is allowed has done so by now."""
    time.sleep(0.002)
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        connection.setblocking(True)


def _packet(connection: socket.socket) -> tuple[int, bytes]:
    kind = _exactly(connection, 1)[0] >> 4
    size = shift = 0
    while True:
        byte = _exactly(connection, 1)[0]
        size |= (byte & 127) << shift
        shift += 7
        if not byte & 128:
            return kind, _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
