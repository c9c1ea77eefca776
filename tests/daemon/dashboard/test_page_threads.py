"""Threads that make pages, really held: when they are said to get on."""

import asyncio
import threading

import pytest

pytest.importorskip("fastapi", reason="needs the extra dashboard")

import anyio
import anyio.to_thread

from daemon.dashboard.site.server import PageThreads


class Held:
    """Two threads, and pieces of work in them that wait to be let go; `later` is a look so many seconds afterwards."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.limiter = anyio.CapacityLimiter(2)
        self.threads = PageThreads(self.limiter, lambda: self.now_s)
        self.work: list[tuple[threading.Event, asyncio.Task[bool]]] = []

    def begin(self) -> None:
        free = threading.Event()
        self.work.append((free, asyncio.create_task(anyio.to_thread.run_sync(free.wait, limiter=self.limiter))))

    async def end(self, number: int) -> None:
        free, task = self.work[number]
        free.set()
        await task

    async def are_held(self, count: int) -> None:
        while self.limiter.borrowed_tokens + self.limiter.statistics().tasks_waiting < count:
            await asyncio.sleep(0.01)

    def later(self, seconds: float) -> bool:
        self.now_s += seconds
        return self.threads.are_progressing()


async def hold_and_let_go() -> None:
    held = Held()
    try:
        assert held.later(3600)
        held.begin()
        await held.are_held(1)
        assert held.later(3600), "one is held for ever, the other is free"
        held.begin()
        held.begin()  # this one waits for a thread
        await held.are_held(3)
        assert held.later(1)
        assert held.later(59), "pages take their time"
        await held.end(0)
        assert held.later(1), "one has ended, and the next has taken its place"
        assert held.later(59)
        assert not held.later(1), "nothing has ended for a minute"
        await held.end(1)
        assert held.later(3600)
    finally:
        for free, _ in held.work:
            free.set()
        await asyncio.gather(*(task for _, task in held.work))


def test_threads_are_progressing_where_one_is_free_or_any_has_ended_something_within_a_minute() -> None:
    asyncio.run(hold_and_let_go())
