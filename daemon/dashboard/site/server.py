"""uvicorn with limits on clients that are slow, silent or too many, and a check that the page threads progress."""

import asyncio
import math
import socket
import time
from typing import Any

import anyio
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from daemon.dashboard.site.live import MAX_LISTENERS, LiveTopics

#: Every listener, and as many other connections.
_MAX_CONNECTIONS = 2 * MAX_LISTENERS
#: Connections that pages may not use, so that `/healthz` and `/metrics` are always answered.
_KEPT_FOR_PROBES = 16
_PROBES = ("/metrics", "/healthz", "/readyz")
#: A scraper asks one at a time.
_MAX_SCRAPES = 8
#: asyncio accepts as many before it looks at any of them: more could use up the file handles.
_ACCEPTED_AT_ONCE = 128
_REQUEST_S = 5.0
#: After this long a client that leaves sent bytes unread is cut off.
_UNREAD_S = 5.0
_CLOSING_S = 3.0
_SEND_BUFFER_BYTES = 256 * 1024
_GRACE_S = 1
_MAX_HEADER_BYTES = 16 * 1024
_SWEEP_TICKS = 10  # of 0.1 s


class _HttpConnection(H11Protocol):
    """One client's connection, with the times by which `PageServer` finds late ones."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._is_answering = False
        self._pages, self.app = self.app, self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._quiet_s = time.monotonic()
        self._unread_s: float | None = None
        self._closing_s: float | None = None
        # The kernel's buffer for a client that does not read would grow to megabytes.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            others = _connections(self.server_state)
            waiting = [other for other in others if other.waits_for_client and not other.is_admitted]
            oldest = min(waiting, key=lambda other: other._quiet_s, default=self)
            oldest.transport.abort()

    @property
    def waits_for_client(self) -> bool:
        """True while it waits for a request, the rest of a body, the reading of an answer, or after a wrong token."""
        is_guess = self.scope is not None and self.scope.get("state", {}).get("is_guess", False)
        return self._unread_s is not None or not self._is_answering or self.cycle.more_body or is_guess

    @property
    def is_admitted(self) -> bool:
        """True while a request with the right token or cookie is sent, answered or read: no other takes its place."""
        is_busy = self._is_answering or self._unread_s is not None
        return is_busy and self.scope is not None and self.scope.get("state", {}).get("is_admitted", False)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse a page if only connections kept for probes are left, or too many scrapes."""
        others = _connections(self.server_state)
        answering = [other.scope["path"] for other in others if other.scope and not other.waits_for_client]
        app = self._pages
        is_page = scope["path"] not in _PROBES
        if (is_page and len(answering) >= _MAX_CONNECTIONS - _KEPT_FOR_PROBES) or (
            scope["path"] == "/metrics" and answering.count("/metrics") >= _MAX_SCRAPES
        ):
            text = "too many requests are being answered: try again in a moment\n"
            app = PlainTextResponse(text, 503, headers={"Retry-After": "2", "Connection": "close"})
        self._is_answering = app is self._pages
        try:
            await app(scope, receive, send)
        finally:
            self._is_answering = False

    def on_response_complete(self) -> None:
        self._quiet_s = time.monotonic()
        if self.conn.trailing_data[0]:
            self.transport.close()  # requests that did not wait for this answer would be as many unread ones
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._unread_s = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_s = None
        super().resume_writing()

    def is_late(self, now_s: float, request_s: float) -> bool:
        if self.transport.is_closing():
            self._closing_s = self._closing_s or now_s
            return now_s - self._closing_s > _CLOSING_S
        if self._unread_s is not None:
            return now_s - self._unread_s > _UNREAD_S
        heard_s = self.scope.get("state", {}).get("heard_s", 0.0) if self.scope is not None else 0.0
        return self.waits_for_client and now_s - max(self._quiet_s, heard_s) > request_s


class PageServer(uvicorn.Server):
    """Cuts off clients that need over `request_s` for a request; `heard_s` in its `state` restarts that time."""

    def __init__(self, app: ASGIApp, live: LiveTopics, request_s: float = _REQUEST_S) -> None:
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
                backlog=_ACCEPTED_AT_ONCE,
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            )
        )
        self._live = live
        self._request_s = request_s

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP_TICKS == 0:
            self._sweep(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close event streams and stalled requests first: they would never end by themselves."""
        self._live.close()
        self._sweep(math.inf)
        await super().shutdown(sockets)

    def _sweep(self, now_s: float) -> None:
        for connection in _connections(self.server_state):
            if connection.is_late(now_s, self._request_s):
                connection.transport.abort()


def _connections(state: ServerState) -> list[_HttpConnection]:
    return [connection for connection in state.connections if isinstance(connection, _HttpConnection)]


class PageThreads:
    """The threads behind `limiter`, watched from the event loop: stuck ones would answer no page."""

    def __init__(self, limiter: anyio.CapacityLimiter) -> None:
        self._limiter = limiter
        self._pages: frozenset[object] = frozenset()

    def are_progressing(self) -> bool:
        """Return True if a thread is free, or one has another page than at the last call."""
        before, threads = self._pages, self._limiter.statistics()
        self._pages = frozenset(threads.borrowers)
        return threads.borrowed_tokens < threads.total_tokens or self._pages != before
