"""A thread that does work for senders in turn, so that one that asks for much does not delay the others."""

import threading
import time
from collections.abc import Callable

import structlog

from daemon.wire.fair_queue import FairQueue

_MAX_REST_S = 0.1


class FairThread:
    """`add` is called from any thread, the work in this one's. The caller bounds how much waits."""

    def __init__(self, name: str, *, rests: bool = False) -> None:
        """With `rests` it rests between two pieces of work as long as it worked, so that other threads go on."""
        self._rests = rests
        self._waiting: FairQueue[Callable[[], None]] = FairQueue()
        self._changed = threading.Condition()
        self._stopping = False
        self._log = structlog.get_logger("intake")
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        self._thread.start()

    def add(self, sender: str, work: Callable[[], None], size_bytes: int = 0) -> None:
        with self._changed:
            self._waiting.add((sender,), work, size_bytes)
            self._changed.notify()

    def stop(self) -> None:
        """Finish the running work and end; what waits is dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            began_s = time.monotonic()
            try:
                work()
            except Exception:  # noqa: BLE001 - one message must not stop the line
                self._log.exception("intake_work_failed", thread=self._thread.name)
            del work  # frees its payload before the next one comes
            if self._rests:
                self._rest(time.monotonic() - began_s)

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._stopping and not len(self._waiting):
                self._changed.wait()
            return None if self._stopping else self._waiting.take()

    def _rest(self, worked_s: float) -> None:
        with self._changed:
            if len(self._waiting):
                self._changed.wait_for(lambda: self._stopping, min(worked_s, _MAX_REST_S))
