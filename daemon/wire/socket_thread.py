"""A thread that owns one bound socket, and the mailbox through which other threads reach it."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import zmq

from daemon.errors import StartError
from daemon.wire.connection_guard import ConnectionGuard, ConnectionLimits, Socket
from daemon.wire.sockets import ServerKeys, bind, rebind, remove_files

T = TypeVar("T")

#: Clients that have not finished their handshake by then are disconnected: a connection costs a file handle. The
#: kernel finds TCP peers that vanished without closing within half a minute.
_HANDSHAKE_MS = 5000


class Mailbox(Generic[T]):
    """Items for one thread: any thread may `put`, the owner calls `take_all` and `close` and polls `fileno()`."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # a descriptor closed under a writer may by then belong to another file
        self._closed = False

    def fileno(self) -> int:
        return self._wake

    def put(self, item: T) -> None:
        """Add an item and wake the owner. An item that comes after `close` is dropped: nothing reads it any more."""
        with self._lock:
            self._items.append(item)
            # The first item wakes the owner, which takes all: waking it for each would cost a system call each.
            if len(self._items) == 1 and not self._closed:
                os.eventfd_write(self._wake, 1)

    def wake(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def take_all(self) -> list[T]:
        """Return all items, oldest first; the descriptor is cleared before, so that a later item wakes the owner."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        items: list[T] = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._wake)


#: Time for queued answers to leave when a socket closes.
_LINGER_MS = 500
_REBOUND_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Binding:
    """A socket to bind and its endpoints. `keys` are needed for endpoints that other machines can reach."""

    context: "zmq.Context[Any]"
    kind: int
    endpoints: Sequence[str]
    limits: ConnectionLimits
    keys: ServerKeys | None = None


class SocketThread:
    """`configure` sets options before the bind; `serve` runs until `stop`, and is woken by `mailbox`."""

    def __init__(
        self,
        name: str,
        binding: Binding,
        mailbox: Mailbox[Any],
        configure: Callable[[Socket], None],
        serve: Callable[[Socket], None],
    ) -> None:
        self._binding = binding
        self.guard = ConnectionGuard(name, binding.context, binding.limits)
        self._mailbox = mailbox
        self._configure = configure
        self._serve = serve
        self._bound: Future[list[str]] = Future()
        self._sock: Socket | None = None
        self._thread = threading.Thread(target=self._run, name=name)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> list[str]:
        """Bind, begin to serve, and return the endpoints as bound (ports filled in); StartError if that fails."""
        self._thread.start()
        try:
            return self._bound.result()
        except BaseException:
            self._thread.join()
            raise

    def rebind(self, keys: ServerKeys, call: Callable[[Callable[[], None]], None]) -> None:
        """Cut the clients of open endpoints, and bind these again under `keys`; StartError if that fails.

        Call it from another thread; `call` passes a function to this one.
        """
        done: Future[None] = Future()

        def carry_out() -> None:
            try:
                assert self._sock is not None
                done.set_result(rebind(self._sock, self._bound.result(), keys))
            except Exception as error:  # noqa: BLE001 - the caller gets it; serving goes on
                done.set_exception(error)

        call(carry_out)
        try:
            done.result(_REBOUND_WITHIN_S)
        except TimeoutError:
            raise StartError(f"the {self._thread.name} thread does not answer: {self._binding.endpoints}") from None

    def stop(self) -> None:
        """Wake `serve`, which its owner has asked to end, and wait until the socket is closed."""
        if self._thread.ident is None:
            return  # a start that failed elsewhere stops what it had not started yet
        self._mailbox.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            sock = self._open()
        except BaseException as error:  # noqa: BLE001 - the caller of start() gets it
            self._mailbox.close()
            self._bound.set_exception(error)
            return
        try:
            self._serve(sock)
        finally:
            self._mailbox.close()
            self.guard.stop(sock)
            remove_files(self._binding.endpoints)
            sock.close(linger=_LINGER_MS)

    def _open(self) -> Socket:
        sock: Socket = self._binding.context.socket(self._binding.kind)
        self.guard.watch(sock)
        sock.handshake_ivl = _HANDSHAKE_MS
        sock.tcp_keepalive, sock.tcp_keepalive_idle = 1, 15
        sock.tcp_keepalive_intvl, sock.tcp_keepalive_cnt = 5, 3
        try:
            self._configure(sock)
            self._sock = sock
            self._bound.set_result(bind(sock, self._binding.endpoints, self._binding.keys))
        except BaseException:
            self.guard.stop(sock)
            sock.close(linger=0)
            raise
        return sock
