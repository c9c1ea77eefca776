"""Server-sent events for open pages: one poller for all listeners, and no polling while there are none.

Listeners get a topic's whole text whenever it has changed, so nothing is queued: a slow listener misses texts in
between, never the newest.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import anyio
import structlog
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

MAX_LISTENERS = 64
_POLL_S = 0.5
_HEARTBEAT_S = 15.0
_RETRY_MS = 2000


class TooManyListeners(Exception):  # noqa: N818
    """MAX_LISTENERS pages listen already."""


class _Topic:
    def __init__(self, make: Callable[[], str], every_s: float) -> None:
        self.make = make
        self.every_s = every_s
        self.due_s = 0.0
        self.listeners = 0
        self.text: str | None = None
        self.version = 0


class LiveTopics:
    """Topics and their listeners. `add` topics at start; use everything else in the event loop's thread."""

    def __init__(self) -> None:
        self._topics: dict[str, _Topic] = {}
        self._listeners: set[_Listener] = set()
        self._run_id = secrets.token_hex(4)
        self._version = 0
        self._wake = asyncio.Event()
        self._log: Any = structlog.get_logger("live")
        self._limiter: anyio.CapacityLimiter | None = None

    def add(self, name: str, make: Callable[[], str], every_s: float = _POLL_S) -> None:
        """Add a topic: a thread calls `make` for its whole text every `every_s` while there are listeners."""
        self._topics[name] = _Topic(make, every_s)

    @property
    def names(self) -> list[str]:
        return list(self._topics)

    def stream(self, names: Iterable[str], last_event_id: str = "") -> "EventStream":
        topics = {name: self._topics[name] for name in dict.fromkeys(names)}
        if len(self._listeners) >= MAX_LISTENERS:
            raise TooManyListeners
        run_id, _, seen = last_event_id.partition("-")
        version = int(seen) if run_id == self._run_id and seen.isdecimal() and len(seen) < 20 else 0
        listener = _Listener(topics, dict.fromkeys(topics, version))
        self._join(listener)
        return EventStream(listener, self._run_id, self._leave)

    async def run(self) -> None:
        """Poll the topics that have listeners, in a thread of their own that pages cannot occupy."""
        self._limiter = anyio.CapacityLimiter(1)
        while True:
            if not self._listeners:
                self._wake.clear()
                await self._wake.wait()
            for name, topic in self._topics.items():
                if topic.listeners and time.monotonic() >= topic.due_s:
                    await self._poll(name, topic)
            await asyncio.sleep(_POLL_S / 2)

    def close(self) -> None:
        for listener in list(self._listeners):
            listener.close()

    async def _poll(self, name: str, topic: _Topic) -> None:
        topic.due_s = time.monotonic() + topic.every_s
        try:
            text = await anyio.to_thread.run_sync(topic.make, limiter=self._limiter)
        except Exception:  # noqa: BLE001 - other topics go on, this one later
            self._log.exception("topic_failed", topic=name)
            topic.due_s += 10 * topic.every_s
            return
        if text == topic.text or not topic.listeners:
            return
        self._version += 1
        topic.text, topic.version = text, self._version
        for listener in self._listeners:
            if name in listener.topics:
                listener.news.set()

    def _join(self, listener: "_Listener") -> None:
        self._listeners.add(listener)
        for topic in listener.topics.values():
            topic.listeners += 1
            if topic.listeners == 1:
                topic.due_s = 0.0
        self._wake.set()

    def _leave(self, listener: "_Listener") -> None:
        if listener not in self._listeners:
            return
        self._listeners.discard(listener)
        for topic in listener.topics.values():
            topic.listeners -= 1
            if not topic.listeners:
                topic.text = None  # outdated when a listener comes back


class _Listener:
    def __init__(self, topics: dict[str, _Topic], seen: dict[str, int]) -> None:
        self.topics = topics
        self.seen = seen
        self.news = asyncio.Event()
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        self.news.set()

    def changed(self) -> list[tuple[str, int, str]]:
        self.news.clear()
        changes: list[tuple[str, int, str]] = []
        for name, topic in self.topics.items():
            if topic.text is not None and topic.version > self.seen[name]:
                self.seen[name] = topic.version
                changes.append((name, topic.version, topic.text))
        return sorted(changes, key=lambda change: change[1])


class EventStream(Response):
    """A `text/event-stream` until the client disconnects or the server stops. server.py cuts off slow clients."""

    def __init__(self, listener: _Listener, run_id: str, leave: Callable[[_Listener], None]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._listener = listener
        self._run_id = run_id
        self._leave = leave

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        listener = self._listener
        disconnect = asyncio.create_task(_close_on_disconnect(receive, listener))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for text in self._texts(listener):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._leave(listener)
            disconnect.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await disconnect

    async def _texts(self, listener: _Listener) -> AsyncIterator[str]:
        yield f"retry: {_RETRY_MS}\n\n"
        while not listener.is_closed:
            for name, version, text in listener.changed():
                yield _event(name, f"{self._run_id}-{version}", text)
            try:
                await asyncio.wait_for(listener.news.wait(), _HEARTBEAT_S)
            except TimeoutError:
                yield ": alive\n\n"


async def _close_on_disconnect(receive: Receive, listener: _Listener) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    listener.close()


def _event(name: str, event_id: str, text: str) -> str:
    """Return one event. Each line of `text`, whatever its line end, is a field of its own: none can forge another."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return f"event: {name}\nid: {event_id}\n" + "".join(f"data: {line}\n" for line in lines) + "\n"
