"""Limit the connections of a socket, and cut those that would fill the memory with a message that never ends.

libzmq collects the parts of a message until the last has come, however many there are, and reports nothing meanwhile.
So a thread watches from outside: over TCP the kernel counts the bytes that a connection has sent since its last whole
message; elsewhere a connection is suspected if it sends without a pause while the process grows. A client that was cut
may connect again.
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

_CHECK_S = 0.1
#: libzmq takes a while to free an unfinished message, and not every disconnection is worth a trim.
_TRIM_AFTER_S = 5.0
_MAX_CONNECTIONS = 2048
#: tcpi_bytes_received of Linux' struct tcp_info (since 4.1).
_TCP_INFO_BYTES, _RECEIVED_AT = 192, 128
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Smaller growth does not endanger the memory, and may have other causes.
_MIN_BYTES = 64 * 2**20
#: A connection whose bytes the kernel does not count is suspected after data waited at this many checks in a row.
_SUSPICIOUS_CHECKS = 5


@dataclass(slots=True)
class _Connection:
    """`received_bytes` and the size of the process, `grown_from_bytes`, at its last whole message or its beginning."""

    received_bytes: int
    grown_from_bytes: int
    checks_waiting: int = 0


class ConnectionGuard:
    """Cut connections with more than `max_bytes` of unfinished messages; together they may have four times that.

    `watch`, `start` and `delivered` are called by the thread that owns the socket.
    """

    def __init__(self, context: "zmq.Context[Any]", max_bytes: int) -> None:
        self._context = context
        self._events: zmq.Socket[bytes] | None = None
        self._max_bytes = max(max_bytes, _MIN_BYTES)
        self._connections: dict[int, _Connection] = {}
        self._delivered: set[int] = set()
        self._trim_at_s: float | None = None
        self._trimmed_bytes = _resident_bytes()
        self._stopping = threading.Event()
        self._log = structlog.get_logger("intake")
        self._thread = threading.Thread(target=self._run, name="connection-guard")

    def watch(self, sock: Socket) -> None:
        """Watch `sock`, which is not bound yet: no connection is missed."""
        address = f"inproc://connection-guard-{id(self)}"
        self._events = events = self._context.socket(zmq.PAIR)
        events.rcvhwm = 0  # a full queue of events would stop libzmq's own thread
        events.linger = 0
        events.connect(address)
        sock.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)

    def start(self) -> None:
        """Begin to check connections."""
        self._thread.start()

    def delivered(self, fd: int) -> None:
        """Note that a whole message came over this connection."""
        self._delivered.add(fd)

    def stop(self, sock: Socket) -> None:
        """End; called before `sock` is closed."""
        sock.disable_monitor()  # first: libzmq's own thread would wait until its events are read
        self._stopping.set()
        self._thread.join()

    def abandon(self) -> None:
        """Release what `watch` opened if `sock` could not be bound."""
        if self._events is not None:
            self._events.close()

    def _run(self) -> None:
        assert self._events is not None
        with self._events as events:
            check_at_s = time.monotonic()
            while not self._stopping.is_set():
                left_ms = max(0, int((check_at_s - time.monotonic()) * 1000))
                try:
                    while events.poll(left_ms):
                        self._take(recv_monitor_message(events))
                        left_ms = 0
                    if time.monotonic() >= check_at_s:
                        check_at_s = time.monotonic() + _CHECK_S
                        self._check()
                except Exception:  # noqa: BLE001 - the next check may succeed
                    self._log.exception("connection_check_failed")
                    self._stopping.wait(_CHECK_S)

    def _take(self, event: Any) -> None:
        fd = int(event["value"])
        if event["event"] != zmq.EVENT_ACCEPTED:
            self._connections.pop(fd, None)
            self._trim_at_s = self._trim_at_s or time.monotonic() + _TRIM_AFTER_S
            return
        self._connections[fd] = _Connection(0, _resident_bytes())
        if len(self._connections) > _MAX_CONNECTIONS:
            self._cut(fd, "too many connections")

    def _check(self) -> None:
        resident_bytes = _resident_bytes()
        self._trim(resident_bytes)
        unfinished: dict[int, int] = {}
        for fd, connection in list(self._connections.items()):
            if fd in self._delivered:
                self._delivered.discard(fd)
                connection.received_bytes = _received_bytes(fd) or 0
                connection.grown_from_bytes, connection.checks_waiting = resident_bytes, 0
                continue
            unfinished[fd] = self._unfinished_bytes(fd, connection, resident_bytes)
        total_bytes = sum(unfinished.values())
        for fd, size_bytes in sorted(unfinished.items(), key=lambda item: -item[1]):
            if size_bytes <= self._max_bytes and total_bytes <= 4 * self._max_bytes:
                return
            total_bytes -= size_bytes
            self._cut(fd, "a message that does not end", size_bytes)

    def _trim(self, resident_bytes: int) -> None:
        """Return free memory to the system after a connection has ended whose messages may have filled it."""
        now_s = time.monotonic()
        if self._trim_at_s is None or now_s < self._trim_at_s:
            return
        if resident_bytes > self._trimmed_bytes + self._max_bytes:
            _give_memory_back()
            resident_bytes = _resident_bytes()
        self._trim_at_s, self._trimmed_bytes = None, resident_bytes

    @staticmethod
    def _unfinished_bytes(fd: int, connection: _Connection, resident_bytes: int) -> int:
        """Return the bytes since its last whole message; over ipc, by how much the process has grown since."""
        received_bytes = _received_bytes(fd)
        if received_bytes is not None:
            return received_bytes - connection.received_bytes
        if not _has_waiting_data(fd):
            connection.grown_from_bytes, connection.checks_waiting = resident_bytes, 0
            return 0
        connection.checks_waiting += 1
        if connection.checks_waiting < _SUSPICIOUS_CHECKS:
            return 0
        return max(0, resident_bytes - connection.grown_from_bytes)

    def _cut(self, fd: int, why: str, size_bytes: int = 0) -> None:
        self._connections.pop(fd, None)
        self._log.warning("connection_cut", reason=why, bytes=size_bytes)
        with contextlib.suppress(OSError), _socket_of(fd) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _socket_of(fd: int) -> socket.socket:
    """Return the connection behind libzmq's descriptor, with a descriptor of our own; OSError if it is closed."""
    return socket.socket(fileno=os.dup(fd))


def _received_bytes(fd: int) -> int | None:
    """Return the bytes that came over a TCP connection so far; None if it is not TCP, or is closed."""
    try:
        with _socket_of(fd) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0])
    except (OSError, struct.error):
        return None


def _has_waiting_data(fd: int) -> bool:
    """Return True if bytes wait in the kernel: they are sent faster than they are read."""
    waiting = bytearray(4)
    try:
        fcntl.ioctl(fd, termios.FIONREAD, waiting)
    except OSError:
        return False
    return any(waiting)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


def _give_memory_back() -> None:
    """Return free memory to the system: glibc keeps what lies between used blocks; other libraries do not."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
