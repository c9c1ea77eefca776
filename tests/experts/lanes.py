"""Copy streams for machines without a GPU."""

import random
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch


class LateLane:
    """A lane as late as one may be: copies are carried out only when somebody waits for them."""

    def __init__(self, _device: torch.device | None = None, pages: int = 2) -> None:
        self.given: list[Callable[[], object]] = []
        self._marks = [0] * pages
        self._done = 0

    def begin(self) -> None:
        """Copies wait for nothing but this lane."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.given.append(partial(target.copy_, source))

    def run(self, work: Callable[[], object]) -> None:
        self.given.append(work)

    def mark(self, page: int) -> None:
        self._marks[page] = len(self.given)

    def wait(self, page: int) -> None:
        self._carry_out(self._marks[page])

    def finish(self) -> None:
        self._carry_out(len(self.given))

    def _carry_out(self, until: int) -> None:
        for work in self.given[self._done : until]:
            work()
        self._done = max(self._done, until)


class StreamLane:
    """A stream with a thread of its own: work is done in its order, each part late by up to `delay_s`, at random.

    So copies of two lanes end in any order, and nothing is done when a call returns, unless it waits. `on_work` is
    called before each part; the device is lost if it raises RuntimeError: what waits for it then raises the same.
    """

    def __init__(
        self,
        _device: torch.device | None = None,
        pages: int = 2,
        delay_s: float = 0.002,
        on_work: Callable[[], object] = lambda: None,
    ) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._marks: dict[int, threading.Event] = {}
        self._errors: list[RuntimeError] = []
        work = (self._work, self._errors, delay_s, on_work)
        threading.Thread(target=_carry_out, args=work, name="simulated stream", daemon=True).start()
        weakref.finalize(self, self._work.put, None)

    def begin(self) -> None:
        """Copies wait for nothing but this lane."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._work.put(partial(target.copy_, source))

    def run(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def mark(self, page: int) -> None:
        self._marks[page] = event = threading.Event()
        self._work.put(event.set)

    def wait(self, page: int) -> None:
        if page in self._marks:
            self._marks[page].wait()
        if self._errors:
            raise self._errors[0]

    def finish(self) -> None:
        self.mark(-1)
        self.wait(-1)


def _carry_out(
    work: "SimpleQueue[Callable[[], object] | None]",
    errors: list[RuntimeError],
    delay_s: float,
    on_work: Callable[[], object],
) -> None:
    while (part := work.get()) is not None:
        is_event = getattr(part, "__name__", "") == "set"  # events come even from a lost device, as errors
        if not is_event and errors:
            continue
        if not is_event:
            time.sleep(random.uniform(0.0, delay_s))
            try:
                on_work()
            except RuntimeError as error:
                errors.append(error)
                continue
        part()
