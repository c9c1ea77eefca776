"""A probe that passes through intake, journal, writer, drive and publish, each between two pieces of work.

A thread that hangs, spins or has ended keeps it, and no ping goes to the watchdog. A problem that a restart would not
solve does not hold it: the writer takes its turns also while the disk is full or the database is locked.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

#: Has the callback called in a thread of the daemon, soon.
Station = Callable[[Callable[[], None]], object]


class PipelineProbe:
    """`send` is for one thread; stations call back from theirs."""

    def __init__(self, stations: Sequence[tuple[str, Station]]) -> None:
        self._stations = tuple(stations)
        self._lock = threading.Lock()
        self._number = 0
        self._at: int | None = None  # the station that has the probe; None while there is none under way
        self._since_s = time.monotonic()
        self.came_through = 0
        self._log: Any = structlog.get_logger("pulse")

    def send(self) -> None:
        with self._lock:
            if self._at is not None:
                return
            self._number += 1
            number = self._number
        self._hand_to(0, number)

    def held_by(self) -> tuple[str, float] | None:
        with self._lock:
            return None if self._at is None else (self._stations[self._at][0], time.monotonic() - self._since_s)

    def _hand_to(self, station: int, number: int) -> None:
        with self._lock:
            self._at, self._since_s = station, time.monotonic()
        name, hand_over = self._stations[station]
        try:
            hand_over(lambda: self._passed(station, number))
        except Exception:  # noqa: BLE001 - the probe stays where it is: nothing can pass there
            self._log.exception("probe_refused", thread=name)

    def _passed(self, station: int, number: int) -> None:
        with self._lock:
            if (self._at, self._number) != (station, number):
                return
            if station + 1 == len(self._stations):
                self._at = None
                self.came_through += 1
                return
        self._hand_to(station + 1, number)
