"""Whether the threads that make pages get on: where all of them wait for each other, no page is answered any more."""

import time
from collections.abc import Callable

import anyio

#: So long may all threads hold one piece of work each: the longest page asks the database for three quarters of that.
_A_PAGE_TAKES_S = 60.0


class PageThreads:
    """The threads behind `limiter`, looked at now and then from the event loop."""

    def __init__(self, limiter: anyio.CapacityLimiter, clock: Callable[[], float] = time.monotonic) -> None:
        self._limiter = limiter
        self._clock = clock
        self._held: frozenset[object] = frozenset()
        self._since_s = clock()

    def are_getting_on(self) -> bool:
        """Whether one is free, or one of them has ended something within the last minute."""
        seen = self._limiter.statistics()
        held = frozenset(seen.borrowers) if seen.borrowed_tokens >= seen.total_tokens else frozenset()
        if not held or held != self._held:
            self._held, self._since_s = held, self._clock()
        return self._clock() - self._since_s < _A_PAGE_TAKES_S
