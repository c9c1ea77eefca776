"""Server-sent events for open pages: one poller for all listeners, and no polling while there are none.

A listener gets a topic's whole text whenever it has changed: a slow one misses texts in between, never the newest.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
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
    """Topics and their streams. `add` topics at start; use everything else in the event loop's thread."""

    def __init__(self) -> None:
        self.run_id = secrets.token_hex(4)
        self.streams: list[EventStream] = []
        #: Set, then replaced by a new one, when a text changes, a stream opens or all are to end.
        self.news = asyncio.Event()
        self._topics: dict[str, _Topic] = {}
        self._log: Any = structlog.get_logger("live")

    def add(self, name: str, make: Callable[[], str], every_s: float = POLL_S) -> None:
        """Add a topic: a thread calls `make` for its whole text every `every_s` while there are listeners."""
        self._topics[name] = _Topic(make, every_s)

    def text(self, name: str) -> str:
        return self._topics[name].make()

    def newest(self, name: str) -> str | None:
        return self._topics[name].text

    def stream(self, names: Sequence[str]) -> "EventStream":
        """Return a response that listens. HTTPException for an unknown topic, or beyond MAX_LISTENERS."""
        for name in names:
            if name not in self._topics:
                raise HTTPException(404, f"topic {name}: expected one of {', '.join(self._topics)}")
        if len(self.streams) >= MAX_LISTENERS:
            raise HTTPException(503, f"{MAX_LISTENERS} live pages are open already: close one, or try again later")
        return EventStream(self, names)

    def wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    async def run(self) -> None:
        """Poll the topics that have listeners, in a thread of their own that pages cannot occupy."""
        limiter = anyio.CapacityLimiter(1)
        while True:
            for name, topic in self._topics.items():
                if not any(name in stream.names for stream in self.streams):
                    topic.text, topic.due_s = None, 0.0
                elif time.monotonic() >= topic.due_s:
                    await self._poll(name, topic, limiter)
            is_idle = not self.streams and all(topic.text is None for topic in self._topics.values())
            await (self.news.wait() if is_idle else asyncio.sleep(POLL_S / 2))

    def close(self) -> None:
        for stream in self.streams:
            stream.is_open = False
        self.wake()

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
            self.wake()


class EventStream(EventSourceResponse):
    """Events until the client disconnects or the server stops. server.py cuts off slow clients."""

    def __init__(self, live: LiveTopics, names: Sequence[str]) -> None:
        super().__init__(self._events(), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self.names, self.is_open = names, True
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._live.streams.append(self)
        self._live.wake()
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._live.streams.remove(self)

    async def _events(self) -> AsyncIterator[bytes]:
        sent: dict[str, str] = {}
        yield format_sse_event(retry=_RETRY_MS)
        while self.is_open:
            news = self._live.news  # taken first, so that a text that arrives while others are sent is not missed
            for name in self.names:
                text = self._live.newest(name)
                if text is not None and text != sent.get(name):
                    sent[name] = text
                    yield format_sse_event(event=name, id=self._live.run_id, data_str=text)
            try:
                await asyncio.wait_for(news.wait(), _HEARTBEAT_S)
            except TimeoutError:
                yield format_sse_event(comment="alive")
