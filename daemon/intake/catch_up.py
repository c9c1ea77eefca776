"""Answer consumers that catch up on results, in a thread of its own, one connection after another.

The thread rests between two answers as long as it worked, so that long queries delay no images.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog

from daemon.wire.fair_queue import FairQueue
from daemon.wire.messages import MAX_HEADER_BYTES, ResultsSince, encode

#: Maximum number of waiting questions, of one connection and of all.
_QUESTIONS_PER_PEER = 1000
_QUESTIONS = 20_000
_MAX_REST_S = 0.1
#: Messages per query.
_PIECE = 100
#: The more questions a consumer has waiting, the fewer messages it gets with each answer, down to this.
_MIN_PAGE = 10
_MANY_MESSAGES = 1000

Page = Mapping[str, Any]
ResultsReader = Callable[[int, int], Page]


class CatchUps:
    """Call `ask` from one thread; `done` is called in another, with the page, or None if it could not be read."""

    def __init__(self, results_since: ResultsReader) -> None:
        self._results_since = results_since
        self._by_peer: Counter[str] = Counter()
        self._waiting: FairQueue[Callable[[], None]] = FairQueue()
        self._changed = threading.Condition()
        self._stopping = False
        self._log = structlog.get_logger("intake")
        self._thread = threading.Thread(target=self._run, name="intake-results")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def ask(
        self, peer: str, message: ResultsSince, is_reading: Callable[[], bool], done: Callable[[Page | None], None]
    ) -> bool:
        """Queue a question; False if too many wait. A peer that has stopped reading by then gets no page."""
        with self._changed:
            if self._by_peer[peer] >= _QUESTIONS_PER_PEER or self._by_peer.total() >= _QUESTIONS:
                return False
            self._by_peer[peer] += 1
            self._waiting.add((peer,), partial(self._answer, peer, message, is_reading, done), 0)
            self._changed.notify()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or len(self._waiting))
                if self._stopping:
                    return
                answer = self._waiting.take_next()
            began_s = time.monotonic()
            answer()
            with self._changed:
                if len(self._waiting):
                    worked_s = time.monotonic() - began_s
                    self._changed.wait_for(lambda: self._stopping, min(worked_s, _MAX_REST_S))

    def _answer(
        self, peer: str, message: ResultsSince, is_reading: Callable[[], bool], done: Callable[[Page | None], None]
    ) -> None:
        try:
            done(self._page(message, self._by_peer[peer]) if is_reading() else None)
        except Exception:  # noqa: BLE001 - a failed query is the asker's to repeat
            self._log.exception("results_since_failed", seq=message.seq)
            done(None)
        with self._changed:
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]

    def _page(self, question: ResultsSince, questions: int) -> Page:
        """Return about as many messages as fit into one answer, read in pieces so that few are rendered in vain."""
        limit = min(question.limit, max(_MIN_PAGE, _MANY_MESSAGES // questions))
        page = self._results_since(question.seq, min(limit, _PIECE))
        room = MAX_HEADER_BYTES - sum(len(encode(item)) for item in page["items"])
        while page["more"] and room > 0 and (missing := limit - len(page["items"])) > 0:
            further = self._results_since(page["last_seq"], min(missing, _PIECE))
            room -= sum(len(encode(item)) for item in further["items"])
            more = {"last_seq": further["last_seq"], "more": further["more"]}
            page = {**page, **more, "items": [*page["items"], *further["items"]]}
        return page
