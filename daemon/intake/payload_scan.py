"""Looking at a payload: its structure and its sha256. Large ones in a thread of their own, source by source in turn.

A payload of 64 MB takes some 50 ms to hash, one of many tiny segments as long to walk: nobody else's acceptance waits
for that.
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from daemon.intake.image_header import MAX_STEPS, ImageHeaderError, check_image
from daemon.policy.fair_queue import Turns
from daemon.records import Pixels


@dataclass(frozen=True, slots=True)
class PayloadScan:
    """What was found: the payload's sha256 (lower-case hex), and what is wrong with its structure, if anything."""

    sha256: str
    flaw: ImageHeaderError | None


def look_at(payload: bytes, pixels: Pixels, max_pixels: int, max_steps: int = MAX_STEPS) -> PayloadScan:
    """LongWalkError where the structure has more than `max_steps` parts."""
    flaw: ImageHeaderError | None = None
    try:
        check_image(payload, pixels, max_pixels, max_steps)
    except ImageHeaderError as error:
        flaw = error.with_traceback(None)  # it outlives this call, and must not keep the payload alive
    return PayloadScan(hashlib.sha256(payload).hexdigest(), flaw)


@dataclass(frozen=True, slots=True)
class Examination:
    """A payload to look at, and who hears what was found; None where the look itself failed."""

    source: str
    payload: bytes
    pixels: Pixels
    max_pixels: int
    done: Callable[[PayloadScan | None], None]


class PayloadScanner:
    """`submit` from any thread; `done` is called in the examiner's. What waits is bounded by who submits."""

    def __init__(self) -> None:
        self._waiting: Turns[Examination] = Turns()
        self._changed = threading.Condition()
        self._stopping = False
        self._log = structlog.get_logger("examine")
        self._thread = threading.Thread(target=self._run, name="examine")

    def start(self) -> None:
        self._thread.start()

    def submit(self, asked: Examination) -> None:
        with self._changed:
            self._waiting.add(asked.source, asked, len(asked.payload))
            self._changed.notify()

    def stop(self) -> None:
        """Finish the look in hand, and end; the others that wait are forgotten."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (asked := self._next()) is not None:
            try:
                look = look_at(asked.payload, asked.pixels, asked.max_pixels)
            except Exception:  # noqa: BLE001 - one image may not stop the line, whatever it broke
                self._log.exception("examination_failed", source=asked.source)
                look = None
            asked.done(look)
            del asked  # not kept in memory while the next one is waited for

    def _next(self) -> Examination | None:
        with self._changed:
            while not self._stopping and not len(self._waiting):
                self._changed.wait()
            return None if self._stopping else self._waiting.take(1, 0)[0]
