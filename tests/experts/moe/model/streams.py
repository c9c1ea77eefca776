"""Two streams of a GPU, for machines without one: each in its own order, between them in any that marks allow."""

import random
import threading
from collections import deque
from collections.abc import Callable

import torch


class Point:
    """An event of a stream."""

    def __init__(self, streams: "RandomStreams") -> None:
        self.passed = False
        self._streams = streams

    def synchronize(self) -> None:
        self._streams.synchronise(self)


class RandomStreams:
    """What is given to a stream happens later, at a random moment, after what its marks say and never before.

    A kernel that reads a slot too early or too late reads another expert, or memory that was given back.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._copying: deque[tuple[Point | None, Callable[[], None] | None, Point]] = deque()
        self._computing: deque[tuple[Point | None, Callable[[], None] | None, Point]] = deque()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Point | None) -> Point:
        return self._give(self._copying, after, lambda: target.copy_(source))

    def record(self) -> Point:
        return self._give(self._computing, None, None)

    def wait_event(self, event: Point) -> None:
        self._give(self._computing, event, None)

    def launch(self, kernel: Callable[[], None]) -> None:
        """Give the computing stream something to do."""
        self._give(self._computing, None, kernel)

    def synchronise(self, event: Point) -> None:
        with self._lock:
            while not event.passed:
                self._go_on()

    def finish(self) -> None:
        with self._lock:
            while self._copying or self._computing:
                self._go_on()

    def _give(self, queue, after, work) -> Point:
        with self._lock:
            point = Point(self)
            queue.append((after, work, point))
            while (self._copying or self._computing) and self._random.random() < 0.4:
                self._go_on()
            return point

    def _go_on(self) -> None:
        able = [
            queue for queue in (self._copying, self._computing) if queue and (queue[0][0] is None or queue[0][0].passed)
        ]
        assert able, "two streams wait for each other"
        _, work, point = self._random.choice(able).popleft()
        if work is not None:
            work()
        point.passed = True
