"""uvicorn with limits on clients that are slow, silent or too many, and a check that the page threads progress."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import anyio
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from daemon.dashboard.site.live import MAX_LISTENERS, LiveTopics

#: Every listener, and as many other connections.
_MAX_CONNECTIONS = 2 * MAX_LISTENERS
_REQUEST_S = 5.0
#: After this long a client that leaves sent bytes unread is cut off.
_UNREAD_S = 5.0
_CLOSING_S = 3.0
_SEND_BUFFER_BYTES = 256 * 1024
_GRACE_S = 1
_MAX_HEADER_BYTES = 16 * 1024
_SWEEP_TICKS = 10  # of 0.1 s
#: The longest that a page may hold its thread: its questions to the database take three quarters of that at most.
_MAX_PAGE_S = 60.0


class _HttpConnection(H11Protocol):
    """One client's connection, with the times by which `PageServer` finds the late ones."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._quiet_s = time.monotonic()
        self._unread_s: float | None = None
        self._closing_s: float | None = None
        # The kernel's buffer for a client that does not read would grow to megabytes.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            idle = [other for other in self.connections if isinstance(other, _HttpConnection) and other.is_idle]
            oldest = min(idle, key=lambda other: other._quiet_s, default=self)
            oldest.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Return True while it waits for a request, the first or the next."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        self._quiet_s = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._unread_s = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_s = None
        super().resume_writing()

    def is_late(self, now_s: float) -> bool:
        """Return True if its request, its reading or its closing takes too long."""
        if self.transport.is_closing():
            self._closing_s = self._closing_s or now_s
            return now_s - self._closing_s > _CLOSING_S
        if self._unread_s is not None:
            return now_s - self._unread_s > _UNREAD_S
        waits_for_request = self.is_idle or self.cycle.more_body
        return waits_for_request and now_s - self._quiet_s > _REQUEST_S


class PageServer(uvicorn.Server):
    """Serves one listening socket until SIGTERM."""

    def __init__(self, app: ASGIApp, live: LiveTopics) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_HttpConnection,
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                log_level="error",  # malformed requests are not logged
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            )
        )
        self._live = live

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP_TICKS == 0:
            self._sweep(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the event streams first: they never end by themselves."""
        self._live.close()
        await super().shutdown(sockets)

    def _sweep(self, now_s: float) -> None:
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            if isinstance(connection, _HttpConnection) and connection.is_late(now_s):
                connection.transport.abort()


class PageThreads:
    """The threads behind `limiter`, watched from the event loop: deadlocked threads would answer no page any more."""

    def __init__(self, limiter: anyio.CapacityLimiter, clock: Callable[[], float] = time.monotonic) -> None:
        self._limiter = limiter
        self._clock = clock
        self._busy: frozenset[object] = frozenset()
        self._since_s = clock()

    def are_progressing(self) -> bool:
        """Return True if a thread is free, or one of them has finished something within the last minute."""
        threads = self._limiter.statistics()
        busy = frozenset(threads.borrowers) if threads.borrowed_tokens >= threads.total_tokens else frozenset()
        if not busy or busy != self._busy:
            self._busy, self._since_s = busy, self._clock()
        return self._clock() - self._since_s < _MAX_PAGE_S
