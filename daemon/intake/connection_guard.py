"""Connections of a socket: how many there may be, and that none fills the memory with a message that never ends.

libzmq collects the parts of a message until the last has come, however many there are, and says nothing of it. So this
thread watches from outside: what a connection has sent since its last whole message, where the kernel counts that
(TCP), and elsewhere whether it sends without a pause while the process grows. Who is cut may connect again.
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from daemon.wire.socket_thread import Socket

_LOOK_S = 0.1
#: libzmq frees an unfinished message in its own time; and trimming is not for every goodbye.
_TRIM_AFTER_S = 5.0
_MOST_CONNECTIONS = 2048
#: tcpi_bytes_received of Linux' struct tcp_info (since 4.1).
_TCP_INFO_BYTES, _RECEIVED_AT = 192, 128
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Below this nobody's memory is at stake, and a process that grows may have other reasons.
_LEAST_BYTES = 64 * 2**20
#: A connection that the kernel does not count bytes of is only suspected after so many looks at waiting data.
_SUSPICIOUS_LOOKS = 5


@dataclass(slots=True)
class _Connection:
    """`received_bytes` and `grown_from_bytes` (of the process) are of its last whole message, or of its beginning."""

    received_bytes: int
    grown_from_bytes: int
    looks_waiting: int = 0


class ConnectionGuard:
    """`watch`, `start` and `delivered` are for the thread that owns the socket. Who goes beyond `most_bytes` is cut.

    `most_bytes` is of one connection; all of them together may have four times that.
    """

    def __init__(self, context: "zmq.Context[Any]", most_bytes: int) -> None:
        self._context = context
        self._events: zmq.Socket[bytes] | None = None
        self._most_bytes = max(most_bytes, _LEAST_BYTES)
        self._connections: dict[int, _Connection] = {}
        self._delivered: set[int] = set()
        self._trim_at_s: float | None = None
        self._trimmed_bytes = _resident_bytes()
        self._stopping = threading.Event()
        self._log = structlog.get_logger("intake")
        self._thread = threading.Thread(target=self._run, name="doorkeeper")

    def watch(self, sock: Socket) -> None:
        """Before `sock` is bound, so that no connection goes unseen."""
        address = f"inproc://doorkeeper-{id(self)}"
        self._events = events = self._context.socket(zmq.PAIR)
        events.rcvhwm = 0  # a full queue of events would stop libzmq's own thread
        events.linger = 0
        events.connect(address)
        sock.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)

    def start(self) -> None:
        """Begin to look, and to cut."""
        self._thread.start()

    def delivered(self, fd: int) -> None:
        """A whole message came over this connection."""
        self._delivered.add(fd)

    def stop(self, sock: Socket) -> None:
        """Before `sock` closes."""
        sock.disable_monitor()  # first: libzmq's own thread would wait for somebody to hear its events
        self._stopping.set()
        self._thread.join()

    def abandon(self) -> None:
        """Where `sock` could not be bound and is closed."""
        if self._events is not None:
            self._events.close()

    def _run(self) -> None:
        assert self._events is not None
        with self._events as events:
            look_at_s = time.monotonic()
            while not self._stopping.is_set():
                left_ms = max(0, int((look_at_s - time.monotonic()) * 1000))
                try:
                    while events.poll(left_ms):
                        self._take(recv_monitor_message(events))
                        left_ms = 0
                    if time.monotonic() >= look_at_s:
                        look_at_s = time.monotonic() + _LOOK_S
                        self._look()
                except Exception:  # noqa: BLE001 - a look that failed is not the last one
                    self._log.exception("look_at_connections_failed")
                    self._stopping.wait(_LOOK_S)

    def _take(self, event: Any) -> None:
        fd = int(event["value"])
        if event["event"] != zmq.EVENT_ACCEPTED:
            self._connections.pop(fd, None)
            self._trim_at_s = self._trim_at_s or time.monotonic() + _TRIM_AFTER_S
            return
        self._connections[fd] = _Connection(0, _resident_bytes())
        if len(self._connections) > _MOST_CONNECTIONS:
            self._cut(fd, "too many connections")

    def _look(self) -> None:
        resident_bytes = _resident_bytes()
        self._trim(resident_bytes)
        unfinished: dict[int, int] = {}
        for fd, connection in list(self._connections.items()):
            if fd in self._delivered:
                self._delivered.discard(fd)
                connection.received_bytes = _received_bytes(fd) or 0
                connection.grown_from_bytes, connection.looks_waiting = resident_bytes, 0
                continue
            unfinished[fd] = self._unfinished_bytes(fd, connection, resident_bytes)
        total_bytes = sum(unfinished.values())
        for fd, size_bytes in sorted(unfinished.items(), key=lambda item: -item[1]):
            if size_bytes <= self._most_bytes and total_bytes <= 4 * self._most_bytes:
                return
            total_bytes -= size_bytes
            self._cut(fd, "a message that does not end", size_bytes)

    def _trim(self, resident_bytes: int) -> None:
        """After a connection has ended, whose messages may have filled the memory."""
        now_s = time.monotonic()
        if self._trim_at_s is None or now_s < self._trim_at_s:
            return
        if resident_bytes > self._trimmed_bytes + self._most_bytes:
            _give_memory_back()
            resident_bytes = _resident_bytes()
        self._trim_at_s, self._trimmed_bytes = None, resident_bytes

    @staticmethod
    def _unfinished_bytes(fd: int, connection: _Connection, resident_bytes: int) -> int:
        """What it has sent since its last whole message; where nobody counts, what the process grew by meanwhile."""
        received_bytes = _received_bytes(fd)
        if received_bytes is not None:
            return received_bytes - connection.received_bytes
        if not _has_waiting_data(fd):
            connection.grown_from_bytes, connection.looks_waiting = resident_bytes, 0
            return 0
        connection.looks_waiting += 1
        if connection.looks_waiting < _SUSPICIOUS_LOOKS:
            return 0
        return max(0, resident_bytes - connection.grown_from_bytes)

    def _cut(self, fd: int, why: str, size_bytes: int = 0) -> None:
        self._connections.pop(fd, None)
        self._log.warning("connection_cut", reason=why, bytes=size_bytes)
        with contextlib.suppress(OSError), _socket_of(fd) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _socket_of(fd: int) -> socket.socket:
    """The connection behind libzmq's descriptor, by one of our own; OSError where that is no socket any more."""
    return socket.socket(fileno=os.dup(fd))


def _received_bytes(fd: int) -> int | None:
    """Bytes that came over a TCP connection so far; None over any other, or over none."""
    try:
        with _socket_of(fd) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0])
    except (OSError, struct.error):
        return None


def _has_waiting_data(fd: int) -> bool:
    """Whether bytes wait in the kernel: somebody sends faster than they are read."""
    waiting = bytearray(4)
    try:
        fcntl.ioctl(fd, termios.FIONREAD, waiting)
    except OSError:
        return False
    return any(waiting)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


def _give_memory_back() -> None:
    """Free memory goes back to the system: glibc keeps what lies between blocks in use. Others need no help."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
