"""Waiting for a state that comes soon; the limit only ends what hangs, and no test asserts it."""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

#: A crowded machine stands still for seconds, and for a minute where it starts processes.
PATIENCE_S = 240.0
_LOOK_EVERY_S = 0.01
T = TypeVar("T")


def until(happened: Callable[[], T], say: Callable[[], object] = lambda: "", patience_s: float = PATIENCE_S) -> T:
    """Return the value of `happened()` once it is true; fail with the text of `say()` if that takes too long."""
    until_s = time.monotonic() + patience_s
    while not (value := happened()):
        assert time.monotonic() < until_s, f"it did not happen within {patience_s:g} s: {say()}"
        time.sleep(_LOOK_EVERY_S)
    return value


async def soon(happened: Callable[[], T], say: Callable[[], object] = lambda: "") -> T:
    """Do as `until`; the question is asked in a thread, and may block."""
    until_s = time.monotonic() + PATIENCE_S
    while not (value := await asyncio.to_thread(happened)):
        assert time.monotonic() < until_s, f"it did not happen within {PATIENCE_S:g} s: {say()}"
        await asyncio.sleep(_LOOK_EVERY_S)
    return value


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test to its end."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run
