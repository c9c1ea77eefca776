"""Server-sent events for open pages: one poller for all listeners, and no polling while there are none.

Listeners get a topic's whole text whenever it has changed, so at most one text of each waits: a slow listener misses
texts in between, never the newest.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import anyio
import structlog
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

MAX_LISTENERS = 64
POLL_S = 0.5
_HEARTBEAT_S = 15.0
_RETRY_MS = 2000


@dataclass(slots=True)
class _Topic:
    make: Callable[[], str]
    every_s: float
    due_s: float = 0.0
    #: None while nobody listens: it would be outdated when a listener comes back.
    text: str | None = None


class LiveTopics:
    """Topics and their listeners. `add` topics at start; use everything else in the event loop's thread."""

    def __init__(self) -> None:
        self.run_id = secrets.token_hex(4)
        self._topics: dict[str, _Topic] = {}
        self._listeners: list[EventStream] = []
        self._wake = asyncio.Event()
        self._log: Any = structlog.get_logger("live")

    def add(self, name: str, make: Callable[[], str], every_s: float = POLL_S) -> None:
        """Add a topic: a thread calls `make` for its whole text every `every_s` while there are listeners."""
        self._topics[name] = _Topic(make, every_s)

    def text(self, name: str) -> str:
        return self._topics[name].make()

    def stream(self, names: Iterable[str]) -> "EventStream":
        """Return a response that listens. HTTPException for an unknown topic, or beyond MAX_LISTENERS."""
        stream = EventStream(self, names)
        if unknown := stream.names - self._topics.keys():
            raise HTTPException(404, f"topic {min(unknown)}: expected one of {', '.join(self._topics)}")
        if len(self._listeners) >= MAX_LISTENERS:
            raise HTTPException(503, f"{MAX_LISTENERS} live pages are open already: close one, or try again later")
        return stream

    def join(self, listener: "EventStream") -> None:
        self._listeners.append(listener)
        for name in listener.names:
            if (text := self._topics[name].text) is not None:
                listener.tell(name, text)
        self._wake.set()

    def leave(self, listener: "EventStream") -> None:
        self._listeners.remove(listener)

    async def run(self) -> None:
        """Poll the topics that have listeners, in a thread of their own that pages cannot occupy."""
        limiter = anyio.CapacityLimiter(1)
        while True:
            for name, topic in self._topics.items():
                if not any(name in listener.names for listener in self._listeners):
                    topic.text, topic.due_s = None, 0.0
                elif time.monotonic() >= topic.due_s:
                    await self._poll(name, topic, limiter)
            if self._listeners or any(topic.text is not None for topic in self._topics.values()):
                await asyncio.sleep(POLL_S / 2)
            else:
                self._wake.clear()
                await self._wake.wait()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def _poll(self, name: str, topic: _Topic, limiter: anyio.CapacityLimiter) -> None:
        topic.due_s = time.monotonic() + topic.every_s
        try:
            text = await anyio.to_thread.run_sync(topic.make, limiter=limiter)
        except Exception:  # noqa: BLE001 - other topics go on, this one later
            self._log.exception("topic_failed", topic=name)
            topic.due_s += 10 * topic.every_s
            return
        if text != topic.text:
            topic.text = text
            for listener in self._listeners:
                if name in listener.names:
                    listener.tell(name, text)


class EventStream(EventSourceResponse):
    """Events until the client disconnects or the server stops. server.py cuts off slow clients."""

    def __init__(self, live: LiveTopics, names: Iterable[str]) -> None:
        super().__init__(self._events(), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self.names = frozenset(names)
        self._live = live
        self._news: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._is_closed = False

    def tell(self, name: str, text: str) -> None:
        self._news[name] = text
        self._wake.set()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._live.join(self)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._live.leave(self)

    async def _events(self) -> AsyncIterator[bytes]:
        yield format_sse_event(retry=_RETRY_MS)
        while not self._is_closed:
            self._wake.clear()
            news, self._news = self._news, {}
            for name, text in news.items():
                yield format_sse_event(event=name, id=self._live.run_id, data_str=text)
            try:
                await asyncio.wait_for(self._wake.wait(), _HEARTBEAT_S)
            except TimeoutError:
                yield format_sse_event(comment="alive")
