"""A server as a good engineer writes one without a scheduler: one queue, threads that take batches, an LRU of models.

A batch is of one expert: the requests for it at the queue's head, or the oldest request with all others of its expert
among the next `window` requests. A thread takes the oldest work there is, loads its model if it is not
there, and computes; meanwhile the other threads do the same. Threads share the queue, the models and the disk.
"""

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch

from experts.spec import ExpertId, ExpertSpec
from experts.vision.preprocess import prepare
from tests.bench.live.expert_files import read_experts, reader_of
from tests.bench.live.loading import Loader, loader_of
from tests.bench.live.sides import SIDES, WINDOW, SideInput, SideResult
from tests.bench.processes import peak_bytes

#: Niceness of threads that compute, the same as our executors': beside other work all sides get the same share.
_NICENESS = 5


class Waiting(NamedTuple):
    """One image at one of its experts."""

    image: int
    step: int
    expert: ExpertId


@dataclass(slots=True)
class RequestQueue:
    """Requests in their order. `window` 1: batches of what stands at the head; None: of all that waits."""

    window: int | None
    max_batch: int
    waiting: deque[Waiting] = field(default_factory=deque[Waiting])

    def take(self) -> list[Waiting]:
        """Return the next batch: the oldest request and those of its expert that may join it."""
        if not self.waiting:
            return []
        oldest = self.waiting[0].expert
        if self.window == 1:
            batch: list[Waiting] = []
            while self.waiting and self.waiting[0].expert == oldest and len(batch) < self.max_batch:
                batch.append(self.waiting.popleft())
            return batch
        matching = (each for each in islice(self.waiting, self.window) if each.expert == oldest)
        batch = list(islice(matching, self.max_batch))
        taken = set(batch)
        self.waiting = deque(each for each in self.waiting if each not in taken)
        return batch

    def put_next(self, requests: list[Waiting]) -> None:
        """Queue the next steps of images: at the head, where order is all, else at the end, where groups form."""
        if self.window == 1:
            self.waiting.extendleft(reversed(requests))
        else:
            self.waiting.extend(requests)


@dataclass(slots=True)
class _Entry:
    spec: ExpertSpec
    users: int = 0
    model: Any = None
    ready: threading.Event = field(default_factory=threading.Event)


class LruModels:
    """Models within a budget: the least recently used one that no thread uses makes room. Any thread."""

    def __init__(self, loader: Loader, budget_bytes: int) -> None:
        self.loads = 0
        self.loader = loader
        self._free_bytes = budget_bytes
        self._entries: OrderedDict[ExpertId, _Entry] = OrderedDict()
        self._changed = threading.Condition()

    @contextmanager
    def use(self, spec: ExpertSpec) -> Iterator[Any]:
        """Yield the model of an expert, which stays meanwhile; load it first where it is not there."""
        with self._changed:
            while spec.expert not in self._entries and not self._make_room(spec.weights_bytes):
                self._changed.wait()
            is_new = spec.expert not in self._entries
            if is_new:
                self._entries[spec.expert] = _Entry(spec)
                self._free_bytes -= spec.weights_bytes
                self.loads += 1
            entry = self._entries[spec.expert]
            entry.users += 1
            self._entries.move_to_end(spec.expert)
        try:
            if is_new:
                try:
                    entry.model = self.loader.load(spec)
                finally:
                    entry.ready.set()
            entry.ready.wait()
            yield entry.model
        finally:
            with self._changed:
                entry.users -= 1
                self._changed.notify_all()

    def fill(self, specs: list[ExpertSpec]) -> set[ExpertId]:
        """Load experts in this order while they fit, and return them; these loads do not count."""
        for spec in specs:
            if spec.weights_bytes <= self._free_bytes:
                with self.use(spec):
                    pass
        self.loads = 0
        return set(self._entries)

    def _make_room(self, size_bytes: int) -> bool:
        for expert, entry in list(self._entries.items()):
            if self._free_bytes >= size_bytes:
                return True
            if entry.users == 0:
                del self._entries[expert]
                self.loader.give_up(entry.model)
                self._free_bytes += entry.spec.weights_bytes
        return self._free_bytes >= size_bytes


@dataclass(slots=True)
class _Finished:
    wait_s: float
    latency_s: float
    unknown: bool


class Server:
    """One run. All times are from its beginning."""

    def __init__(self, work: SideInput) -> None:
        side = SIDES[work.side]
        self._work = work
        self._specs = read_experts(work.catalog)
        reader = reader_of(work.disk)
        loaders = {
            device: loader_of(side.loading, reader, budget_bytes, work.threads_per_executor, device)
            for device, budget_bytes in zip(work.devices, work.budgets, strict=True)
        }
        self._models = {
            device: LruModels(loader, budget_bytes)
            for (device, loader), budget_bytes in zip(loaders.items(), work.budgets, strict=True)
        }
        max_batch = max(row.max_batch for row in work.costs)
        self._queue = RequestQueue(WINDOW if side.window == "limited" else side.window, max_batch)
        self._wanted = min(len(work.trace.images), work.enough_images or len(work.trace.images))
        self._waits_s: dict[int, float] = {}
        self._finished: dict[int, _Finished] = {}
        self._changed = threading.Condition()
        self._began_s = 0.0
        self._has_failed = False

    def run(self) -> SideResult:
        """Serve images as they arrive until all are finished, as many as are enough, or the limit is reached."""
        usage = self._work.trace.usage()
        by_usage = sorted(usage, key=lambda name: -usage[name])
        left = [self._specs[ExpertId(name)] for name in by_usage]
        for models in self._models.values():
            filled = models.fill(left)
            left = [spec for spec in left if spec.expert not in filled]
        self._began_s = time.monotonic()
        with ThreadPoolExecutor(self._work.executors * len(self._models) + 1) as threads:
            ends = [threads.submit(self._arrive)]
            for models in self._models.values():
                ends += [threads.submit(self._serve, models) for _ in range(self._work.executors)]
            for end in ends:
                end.result()
        finished = self._finished.values()
        is_stopped = len(finished) < len(self._work.trace.images)
        return SideResult(
            side=self._work.side,
            images=len(finished),
            seconds=max((each for each in self._end_times_s()), default=self._now_s()),
            stopped=is_stopped,
            loads=sum(models.loads for models in self._models.values()),
            waits_s=tuple(each.wait_s for each in finished),
            latencies_s=tuple(each.latency_s for each in finished),
            unknown=sum(each.unknown for each in finished),
            peak_bytes=peak_bytes(),
        )

    def _end_times_s(self) -> Iterator[float]:
        for number, each in self._finished.items():
            yield self._work.trace.images[number].arrives_s + each.latency_s

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _is_over(self) -> bool:
        return self._has_failed or len(self._finished) >= self._wanted or self._now_s() >= self._work.limit_s

    def _arrive(self) -> None:
        for number, image in enumerate(self._work.trace.images):
            while (wait_s := image.arrives_s - self._now_s()) > 0:
                if self._is_over():
                    return
                time.sleep(min(wait_s, 0.1))
            with self._changed:
                self._queue.waiting.append(Waiting(number, 0, ExpertId(image.classifier)))
                self._changed.notify()

    def _serve(self, models: LruModels) -> None:
        torch.set_num_threads(self._work.threads_per_executor)
        with suppress(OSError):  # a sandbox may forbid it
            os.nice(_NICENESS)
        while True:
            with self._changed:
                while not (batch := self._queue.take()) and not self._is_over():
                    self._changed.wait(0.1)
            if self._is_over():
                return
            try:
                if batch := [each for each in batch if not self._is_late(each)]:
                    self._compute(batch, models)
            except BaseException:
                self._has_failed = True
                raise

    def _is_late(self, request: Waiting) -> bool:
        deadline_s, arrived_s = self._work.deadline_s, self._work.trace.images[request.image].arrives_s
        if deadline_s is None or self._now_s() - arrived_s <= deadline_s:
            return False
        self._waits_s.setdefault(request.image, self._now_s() - arrived_s)
        self._finish(request.image, unknown=True)
        return True

    def _compute(self, batch: list[Waiting], models: LruModels) -> None:
        spec, images = self._specs[batch[0].expert], self._work.trace.images
        with models.use(spec) as model:
            for each in batch:
                self._waits_s.setdefault(each.image, self._now_s() - images[each.image].arrives_s)
            prepared = [prepare(self._work.payload(each.image), "image", None, spec) for each in batch]
            models.loader.answer(model, spec, prepared)
        onward: list[Waiting] = []
        for each in batch:
            experts = images[each.image].experts
            if each.step + 1 < len(experts):
                onward.append(Waiting(each.image, each.step + 1, ExpertId(experts[each.step + 1])))
            elif not self._is_late(each):
                self._finish(each.image, unknown=False)
        with self._changed:
            self._queue.put_next(onward)
            self._changed.notify_all()

    def _finish(self, number: int, *, unknown: bool) -> None:
        latency_s = self._now_s() - self._work.trace.images[number].arrives_s
        self._finished[number] = _Finished(self._waits_s[number], latency_s, unknown)


def run_server(work: SideInput) -> SideResult:
    return Server(work).run()
