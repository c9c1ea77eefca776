"""uvicorn, kept from what would let a few clients hold the pages: slow ones, silent ones, and too many of them."""

import asyncio
import socket
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from daemon.dashboard.site.live import LISTENERS, Live

#: Every listener, and as many connections beside them.
CONNECTIONS = 2 * LISTENERS
_REQUEST_S = 5.0
#: How long a reader may leave what was sent unread, before it is cut.
_UNREAD_S = 5.0
_CLOSING_S = 3.0
_SEND_BUFFER_BYTES = 256 * 1024
_GRACE_S = 1
_MAX_HEADER_BYTES = 16 * 1024
_SWEEP_TICKS = 10  # of 0.1 s


class _Connection(H11Protocol):
    """One client. `server.sweep` asks it now and then what it is held up by."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._begun_s = self._quiet_s = time.monotonic()
        self._unread_s: float | None = None
        self._closing_s: float | None = None
        # What the kernel holds for a reader that does not read is bounded too: left alone it grows to megabytes.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            idle = [one for one in self.connections if isinstance(one, _Connection) and one.is_idle]
            oldest = min(idle, key=lambda one: one._quiet_s, default=self)
            oldest.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request, the first or the next."""
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
        """Whether its request, its reading or its closing has taken longer than anybody honest needs."""
        if self.transport.is_closing():
            self._closing_s = self._closing_s or now_s
            return now_s - self._closing_s > _CLOSING_S
        if self._unread_s is not None:
            return now_s - self._unread_s > _UNREAD_S
        waits_for_request = self.is_idle or self.cycle.more_body
        return waits_for_request and now_s - self._quiet_s > _REQUEST_S


class Server(uvicorn.Server):
    """Serves one listening socket until SIGTERM."""

    def __init__(self, app: ASGIApp, live: Live) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                log_level="error",  # noise that clients send is no news
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
        """Streams never end of themselves: they are ended first."""
        self._live.close()
        await super().shutdown(sockets)

    def _sweep(self, now_s: float) -> None:
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            if isinstance(connection, _Connection) and connection.is_late(now_s):
                connection.transport.abort()
