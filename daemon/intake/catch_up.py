"""Answer consumers that catch up on results, in a thread of its own, connection by connection in turn.

Long queries must not delay images, so the thread rests between two answers as long as it worked. Waiting questions are
bounded; a consumer that asks much at once gets little at a time, and `more` tells it to go on.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog

from daemon.intake.fair_thread import FairThread
from daemon.wire.messages import MAX_HEADER_BYTES, ResultsSince, encode

#: Maximum number of waiting questions, of one connection and of all.
_QUESTIONS_PER_PEER = 1000
_QUESTIONS = 20_000
#: Messages that are read from the database at once.
_PIECE = 100
#: The more questions a consumer has waiting, the fewer messages it gets with each answer, down to this.
_MIN_PAGE = 10
_MANY_MESSAGES = 1000

Page = Mapping[str, Any]
ResultsReader = Callable[[int, int], Page]


class CatchUps:
    """`ask` is called from one thread; `done` in another, with the page, or None if it could not be read."""

    def __init__(self, results_since: ResultsReader) -> None:
        self._results_since = results_since
        self._by_peer: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._log = structlog.get_logger("intake")
        self._thread = FairThread("intake-results", rests=True)
        self.start, self.stop = self._thread.start, self._thread.stop

    def ask(
        self, peer: str, message: ResultsSince, is_reading: Callable[[], bool], done: Callable[[Page | None], None]
    ) -> bool:
        """Put a question into the queue; return False if too many wait already.

        A peer that then is not reading its answers gets no page.
        """
        with self._lock:
            if self._by_peer[peer] >= _QUESTIONS_PER_PEER or self._by_peer.total() >= _QUESTIONS:
                return False
            self._by_peer[peer] += 1
        self._thread.add(peer, partial(self._answer, peer, message, is_reading, done))
        return True

    def _answer(
        self, peer: str, message: ResultsSince, is_reading: Callable[[], bool], done: Callable[[Page | None], None]
    ) -> None:
        try:
            done(self._page(message, self._by_peer[peer]) if is_reading() else None)
        except Exception:  # noqa: BLE001 - a failed query is the asker's to repeat
            self._log.exception("results_since_failed", seq=message.seq)
            done(None)
        with self._lock:
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]

    def _page(self, question: ResultsSince, questions: int) -> Page:
        """Return about as many messages as fit one answer, read in pieces: rendering many more would be wasted."""
        limit = min(question.limit, max(_MIN_PAGE, _MANY_MESSAGES // questions))
        page = self._results_since(question.seq, min(limit, _PIECE))
        room = MAX_HEADER_BYTES - sum(len(encode(item)) for item in page["items"])
        while page["more"] and room > 0 and (missing := limit - len(page["items"])) > 0:
            further = self._results_since(page["last_seq"], min(missing, _PIECE))
            room -= sum(len(encode(item)) for item in further["items"])
            more = {"last_seq": further["last_seq"], "more": further["more"]}
            page = {**page, **more, "items": [*page["items"], *further["items"]]}
        return page
