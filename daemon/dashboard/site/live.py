"""Events for open pages: one poller for all readers, and nothing is asked while nobody listens.

A topic is a text that somebody can make at any time: a rendered fragment, or JSON. Readers get it whole whenever it has
changed. So there is nothing to queue: a reader that is slow misses what was in between, never the newest; one that
comes back says by `Last-Event-ID` what it has, and gets what has changed since.
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

LISTENERS = 64
_POLL_S = 0.5
_HEARTBEAT_S = 15.0
_RETRY_MS = 2000


class Full(Exception):  # noqa: N818
    """64 pages listen already."""


class _Topic:
    def __init__(self, make: Callable[[], str], every_s: float) -> None:
        self.make = make
        self.every_s = every_s
        self.due_s = 0.0
        self.listeners = 0
        self.text: str | None = None
        self.version = 0


class Live:
    """Topics and who listens to them. `add` at start; everything else in the event loop's thread."""

    def __init__(self) -> None:
        self._topics: dict[str, _Topic] = {}
        self._listeners: set[_Listener] = set()
        self._run_id = secrets.token_hex(4)
        self._version = 0
        self._wake = asyncio.Event()
        self._log: Any = structlog.get_logger("live")
        self._limiter: anyio.CapacityLimiter | None = None
        self.is_closed = False

    def add(self, name: str, make: Callable[[], str], every_s: float = _POLL_S) -> None:
        """A topic. `make` is called in a thread, every `every_s` while somebody listens; it gives the text whole."""
        self._topics[name] = _Topic(make, every_s)

    @property
    def names(self) -> list[str]:
        return list(self._topics)

    def stream(self, names: Iterable[str], last_event_id: str = "") -> "EventStream":
        """The answer to a page that listens to `names`. Full where too many do; KeyError for a name there is not."""
        wanted = {name: self._topics[name] for name in dict.fromkeys(names)}
        if len(self._listeners) >= LISTENERS:
            raise Full
        run_id, _, seen = last_event_id.partition("-")
        known = int(seen) if run_id == self._run_id and seen.isdecimal() and len(seen) < 20 else 0
        listener = _Listener(wanted, dict.fromkeys(wanted, known))
        self._join(listener)
        return EventStream(listener, self._run_id, self._leave)

    async def run(self) -> None:
        """Poll what is listened to, for ever. In a thread that pages cannot take away, however much they ask."""
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
        """End every stream, so that the server can."""
        self.is_closed = True
        for listener in list(self._listeners):
            listener.close()

    async def _poll(self, name: str, topic: _Topic) -> None:
        topic.due_s = time.monotonic() + topic.every_s
        try:
            text = await anyio.to_thread.run_sync(topic.make, limiter=self._limiter)
        except Exception:  # noqa: BLE001 - the other topics, and this one at its next turn
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
                topic.text = None  # old by the time that somebody listens again


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
        """What this listener has not seen yet, oldest first."""
        self.news.clear()
        found: list[tuple[str, int, str]] = []
        for name, topic in self.topics.items():
            if topic.text is not None and topic.version > self.seen[name]:
                self.seen[name] = topic.version
                found.append((name, topic.version, topic.text))
        return sorted(found, key=lambda one: one[1])


class EventStream(Response):
    """`text/event-stream` until the reader goes, or the server ends. One that does not read is cut by server.py."""

    def __init__(self, listener: _Listener, run_id: str, leave: Callable[[_Listener], None]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._listener = listener
        self._run_id = run_id
        self._leave = leave

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        listener = self._listener
        gone = asyncio.create_task(_until_gone(receive, listener))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for text in self._texts(listener):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._leave(listener)
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone

    async def _texts(self, listener: _Listener) -> AsyncIterator[str]:
        yield f"retry: {_RETRY_MS}\n\n"
        while not listener.is_closed:
            for name, version, text in listener.changed():
                yield _event(name, f"{self._run_id}-{version}", text)
            try:
                await asyncio.wait_for(listener.news.wait(), _HEARTBEAT_S)
            except TimeoutError:
                yield ": alive\n\n"


async def _until_gone(receive: Receive, listener: _Listener) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    listener.close()


def _event(name: str, event_id: str, text: str) -> str:
    """One event. Every kind of line end inside `text` becomes a line of its own: none can begin another field."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return f"event: {name}\nid: {event_id}\n" + "".join(f"data: {line}\n" for line in lines) + "\n"
