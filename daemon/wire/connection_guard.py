"""Limit the connections of a socket, and cut those that would fill the memory with a message that never ends.

libzmq collects the parts of a message until the last has come, however many, and reports nothing meanwhile. So a thread
watches from outside: over TCP the kernel counts a connection's bytes since its last whole message; elsewhere a
connection is suspected if it sends without a pause while the process grows.

libzmq accepts connections faster than Python cuts them, and its ipc listener ends the process once no handle is left:
the daemon raises its limit of open files at the start (daemon.host.machine).
"""

import ctypes
import fcntl
import functools
import os
import socket
import struct
import sys
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
import zmq

Socket = zmq.Socket[bytes]

_LIBC = ctypes.CDLL(None)
#: Quick calls keep the interpreter's lock (PyDLL): getting it back may take long.
_QUICK_LIBC = ctypes.PyDLL(None)
#: Kind and value of an event, as libzmq sends them: the value is a file descriptor for those that are watched.
_MONITOR_EVENT = struct.Struct("=Hi")

#: Time between two checks; the short one while unfinished messages come in.
_CHECK_S, _SHORT_CHECK_S = 0.1, 0.02
#: libzmq frees an unfinished message late, and a trim after every disconnection would cost too much.
_TRIM_AFTER_S = 5.0
#: An older connection has finished its handshake: the sockets end others after five seconds.
_HANDSHAKE_S = 6.0
#: Time for the first message of a new connection, and the longest pause between messages.
_GRACE_S, _QUIET_S = 2.0, 60.0
#: Cuts for one reason are logged together, this often at most.
_TELL_AGAIN_S = 10.0
#: tcpi_bytes_received of Linux' struct tcp_info (since 4.1).
_TCP_INFO_BYTES, _RECEIVED_AT = 192, 128
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Smaller growth does not endanger the memory, and may have other causes.
_MIN_GROWTH_BYTES = 64 * 2**20
#: A connection whose bytes the kernel does not count is suspected after data waited at this many checks in a row.
_SUSPICIOUS_CHECKS = 5


@dataclass(slots=True)
class _Connection:
    """`received_bytes`, and the size of the process, at its start or last whole message (`heard_s`)."""

    received_bytes: int
    grown_from_bytes: int
    heard_s: float
    checks_waiting: int = 0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a socket's connections: their number, and the bytes of unfinished messages that each may send.

    `free_bytes` and `idle_bytes_per_s` allow for greetings and heartbeats of subscribers, which finish no message.
    """

    connections: int = 64
    unfinished_bytes: int = 64 * 2**20
    free_bytes: int = 0
    idle_bytes_per_s: int = 0


class ConnectionGuard:
    """Cut connections beyond the limits; together they may have four times the unfinished bytes of one.

    If one connection is too many, the oldest that sent nothing yet is cut, else the oldest without a whole message,
    else one that sent none for a minute, else the new one. `watch`, `receive` and `stop` are called by the thread that
    owns the socket.
    """

    def __init__(self, name: str, context: "zmq.Context[Any]", limits: ConnectionLimits) -> None:
        self._context = context
        self._limits = limits
        self._connections: dict[int, _Connection] = {}  # in the order of their last whole messages
        self._silent: dict[int, None] = {}  # may have sent nothing, oldest first
        self._unheard: dict[int, None] = {}  # sent no whole message, oldest first
        self._delivered: set[int] = set()
        self._cuts: Counter[str] = Counter()  # by reason, since the last entry in the log
        self._tell_at_s = 0.0
        self._trim_at_s: float | None = None
        self._resident_bytes = self._trimmed_bytes = _resident_bytes()
        self._stopping = threading.Event()
        self._log = structlog.get_logger(name)
        self._thread = threading.Thread(target=self._run, name=f"{name}-connections")

    def watch(self, sock: Socket) -> None:
        """Watch `sock`; call it before the socket is bound, so that no connection is missed."""
        address = f"inproc://connection-guard-{id(self)}"
        self._events: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # a full queue of events would stop libzmq's own thread
        self._events.linger = 0
        self._events.connect(address)
        wanted = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        sock.monitor(address, wanted)
        self._thread.start()

    def receive(self, sock: Socket, is_allowed: Callable[[str], bool] | None) -> tuple[list[bytes] | None, int]:
        """Return the next message (zmq.Again without one), and the file descriptor of its connection, -1 if it ended.

        The message is None if its sender's key is no longer allowed: a key is checked when a connection is made, and
        `is_allowed` (of the client's public key) is called for each message.
        """
        first = sock.recv(zmq.NOBLOCK, copy=False)
        frames = [first.bytes, *(sock.recv_multipart() if first.more else ())]
        try:
            fd = int(first.get(zmq.SRCFD))
        except zmq.ZMQError:
            fd = -1
        self._delivered.add(fd)
        if is_allowed is None:
            return frames, fd
        try:
            client = first.get("User-Id")
        except zmq.ZMQError:
            return frames, fd  # it came over a local endpoint
        return (frames if is_allowed(str(client)) else None), fd

    def stop(self, sock: Socket) -> None:
        self._stopping.set()
        sock.disable_monitor()  # libzmq's own thread would wait until its events are read; the last one wakes ours
        self._thread.join()

    def _run(self) -> None:
        with self._events as events:
            check_at_s = time.monotonic()
            while not self._stopping.is_set():
                is_idle = not (self._connections or self._cuts or self._trim_at_s)
                left_ms = None if is_idle else max(0, int((check_at_s - time.monotonic()) * 1000))
                try:
                    while events.poll(left_ms):
                        self._handle_event(*_MONITOR_EVENT.unpack(events.recv_multipart()[0]))
                        left_ms = 0
                    if time.monotonic() >= check_at_s:
                        is_growing = self._check()
                        check_at_s = time.monotonic() + (_SHORT_CHECK_S if is_growing else _CHECK_S)
                except Exception:  # noqa: BLE001 - the next check may succeed
                    self._log.exception("connection_check_failed")
                    self._stopping.wait(_CHECK_S)

    def _handle_event(self, event: int, fd: int) -> None:
        self._forget(fd)
        if event != zmq.EVENT_ACCEPTED:
            self._trim_at_s = self._trim_at_s or time.monotonic() + _TRIM_AFTER_S
            return
        if not self._connections:  # without connections nothing was measured
            self._resident_bytes = _resident_bytes()
        self._connections[fd] = _Connection(0, self._resident_bytes, time.monotonic())
        self._silent[fd] = self._unheard[fd] = None
        if len(self._connections) > self._limits.connections:
            self._cut(self._least_wanted(fd), f"more than {self._limits.connections}")

    def _least_wanted(self, newest: int) -> int:
        """Return the connection to cut: one that sent nothing, no whole message, or none for long; else the newest."""
        now_s = time.monotonic()
        self._note_delivered()
        for fd in list(self._silent):
            if now_s - self._connections[fd].heard_s < _HANDSHAKE_S and not _received_bytes(fd):
                return fd
            del self._silent[fd]
        if not self._limits.idle_bytes_per_s:  # else its clients finish no messages
            for order, quiet_s in ((self._unheard, _GRACE_S), (self._connections, _QUIET_S)):
                fd = next(iter(order), newest)
                if now_s - self._connections[fd].heard_s >= quiet_s:
                    return fd
        return newest

    def _note_delivered(self) -> None:
        for fd in list(self._delivered):
            if (connection := self._forget(fd)) is not None:
                self._connections[fd] = connection
                connection.received_bytes, connection.heard_s = _received_bytes(fd) or 0, time.monotonic()
                connection.grown_from_bytes, connection.checks_waiting = self._resident_bytes, 0

    def _check(self) -> bool:
        """Cut connections that are beyond the limits; return True if half of the limit of all together is in use."""
        self._resident_bytes = resident_bytes = _resident_bytes()
        self._trim(resident_bytes)
        if self._cuts and time.monotonic() >= self._tell_at_s:
            for reason, count in self._cuts.items():
                self._log.warning("connections_cut", reason=reason, count=count)
            self._cuts.clear()
            self._tell_at_s = time.monotonic() + _TELL_AGAIN_S
        unfinished: dict[int, int] = {}
        self._note_delivered()
        for fd, connection in self._connections.items():
            unfinished[fd] = self._unfinished_bytes(fd, connection, resident_bytes)
        total_bytes = sum(unfinished.values())
        for fd, size_bytes in sorted(unfinished.items(), key=lambda item: -item[1]):
            if max(size_bytes, total_bytes // 4) <= self._limits.unfinished_bytes:
                break
            total_bytes -= size_bytes
            self._cut(fd, "a message that does not end")
        return total_bytes > 2 * self._limits.unfinished_bytes

    def _trim(self, resident_bytes: int) -> None:
        """Return free memory to the system after a connection has ended whose messages may have filled it."""
        now_s = time.monotonic()
        if self._trim_at_s is None or now_s < self._trim_at_s:
            return
        if resident_bytes > self._trimmed_bytes + _MIN_GROWTH_BYTES:
            _LIBC.malloc_trim(0)  # glibc keeps what lies between used blocks
            resident_bytes = _resident_bytes()
        self._trim_at_s, self._trimmed_bytes = None, resident_bytes

    def _unfinished_bytes(self, fd: int, connection: _Connection, resident_bytes: int) -> int:
        """Return the bytes since its last whole message; over ipc, by how much the process has grown since."""
        received_bytes = _received_bytes(fd)
        if received_bytes is not None:
            idle_bytes = int((time.monotonic() - connection.heard_s) * self._limits.idle_bytes_per_s)
            return max(0, received_bytes - connection.received_bytes - self._limits.free_bytes - idle_bytes)
        if not waiting_bytes(fd, termios.FIONREAD):
            connection.grown_from_bytes, connection.checks_waiting = resident_bytes, 0
            return 0
        connection.checks_waiting += 1
        grown_bytes = resident_bytes - connection.grown_from_bytes
        return grown_bytes if connection.checks_waiting >= _SUSPICIOUS_CHECKS and grown_bytes > _MIN_GROWTH_BYTES else 0

    def _cut(self, fd: int, reason: str) -> None:
        self._cuts[reason] += 1
        self._forget(fd)
        _QUICK_LIBC.shutdown(fd, socket.SHUT_RDWR)  # connections may come faster than they go

    def _forget(self, fd: int) -> _Connection | None:
        self._silent.pop(fd, None)
        self._unheard.pop(fd, None)
        self._delivered.discard(fd)
        return self._connections.pop(fd, None)


def _received_bytes(fd: int) -> int | None:
    """Return the bytes that came over a TCP connection so far; None if it is not TCP, or is closed."""
    info, size = ctypes.create_string_buffer(_TCP_INFO_BYTES), ctypes.c_uint32(_TCP_INFO_BYTES)
    # without a socket.socket, which would need a handle of its own when there may be none left
    if (
        _QUICK_LIBC.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size))
        or size.value < _RECEIVED_AT + 8
    ):
        return None
    return int.from_bytes(info[_RECEIVED_AT : _RECEIVED_AT + 8], sys.byteorder)


def waiting_bytes(fd: int, direction: int) -> int:
    """Return the bytes of a connection that wait in the kernel, to be read (FIONREAD) or to be taken (TIOCOUTQ)."""
    answer = bytearray(4)
    try:
        fcntl.ioctl(fd, direction, answer)
    except OSError:
        return 0
    return int.from_bytes(answer, sys.byteorder)


def _resident_bytes() -> int:
    return int(os.pread(_statm(), 100, 0).split()[1]) * _PAGE_BYTES


@functools.cache
def _statm() -> int:
    """Return the handle of /proc/self/statm, which stays open: there may be none left later."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
