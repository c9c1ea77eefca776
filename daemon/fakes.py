"""A simulated device: the executor and the loader contract without threads, weights or waiting.

Everything happens on a `Timeline`, whose clock jumps from event to event, so that a run is exact and repeatable.
The pool keeps the real one's promises (never above its budget), so that a policy that would overbook is caught.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from daemon.orders import Answered, BatchOrder, BatchReport, ImageOrder, LoadEnd, LoadOrder, Unanswered
from daemon.policy.actions import Resize, Unload
from daemon.policy.request import ExecutorFacts, PoolId
from experts.errors import ExpertError
from experts.spec import Answer, ExpertId, ExpertSpec

#: What an expert says of an image.
AnswerOf = Callable[[ExpertSpec, ImageOrder], Answer | Unanswered]


class Timeline:
    """Simulated seconds. Events at the same time happen in the order in which they were asked for."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def now(self) -> float:
        return self._now_s

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self._now_s + seconds, self._serial, do))

    def step(self, until_s: float | None = None) -> bool:
        """Jump to the next event, or to `until_s` where that is earlier, and do it. False: nothing will ever happen."""
        if not self._events or (until_s is not None and until_s < self._events[0][0]):
            if until_s is None:
                return False
            self._now_s = max(self._now_s, until_s)
            return True
        self._now_s, _, do = heapq.heappop(self._events)
        do()
        return True


@dataclass(frozen=True, slots=True)
class FakeLoad:
    bytes: int
    load_ms: float
    tier: Literal["ram", "disk"] = "disk"


class FakePool:
    """Residents by name only. `broken` experts fail to load, as a damaged file does."""

    def __init__(self, budget_bytes: int, load_s: Callable[[ExpertSpec], float] = lambda _spec: 0.0) -> None:
        self.budget_bytes = budget_bytes
        self.broken: dict[ExpertId, str] = {}
        self._load_s = load_s
        self._resident: dict[ExpertId, ExpertSpec] = {}

    @property
    def used_bytes(self) -> int:
        return sum(spec.weights_bytes for spec in self._resident.values())

    def resident(self) -> tuple[ExpertId, ...]:
        return tuple(self._resident)

    def slot(self, expert: ExpertId) -> ExpertSpec:
        """The resident expert; ExpertError where it is not."""
        if expert not in self._resident:
            raise ExpertError(expert, "is not resident")
        return self._resident[expert]

    def seconds(self, spec: ExpertSpec) -> float:
        """How long a load of `spec` takes."""
        return self._load_s(spec)

    def load(self, spec: ExpertSpec, evict: tuple[ExpertId, ...] = ()) -> FakeLoad:
        for expert in evict:
            self._resident.pop(expert, None)
        if spec.expert in self.broken:
            raise ExpertError(spec.expert, self.broken[spec.expert], spec.file)
        if spec.expert in self._resident:
            raise ExpertError(spec.expert, "is already in the pool")
        free_bytes = self.budget_bytes - self.used_bytes
        if spec.weights_bytes > free_bytes:
            raise ExpertError(spec.expert, f"needs {spec.weights_bytes} bytes, {free_bytes} are free")
        self._resident[spec.expert] = spec
        return FakeLoad(spec.weights_bytes, self._load_s(spec) * 1000.0)

    def unload(self, expert: ExpertId) -> None:
        if self._resident.pop(expert, None) is None:
            raise ExpertError(expert, "is not resident")

    def resize(self, budget_bytes: int) -> None:
        if self.used_bytes > budget_bytes:
            raise ValueError(f"{self.used_bytes} bytes of experts are resident; unload some first")
        self.budget_bytes = budget_bytes

    def check(self) -> None:
        if self.used_bytes > self.budget_bytes:
            raise AssertionError(f"{self.used_bytes} bytes are resident, the budget is {self.budget_bytes}")


class FakeLoader:
    """One transfer at a time, in the order of submission, each taking the pool's simulated time."""

    def __init__(self, pool_id: PoolId, pool: FakePool, timeline: Timeline) -> None:
        self.pool = pool_id
        self._pool = pool
        self._timeline = timeline
        self._orders: list[LoadOrder | Unload | Resize] = []
        self._report: Callable[[LoadEnd], None] = lambda _end: None

    def start(self, report: Callable[[LoadEnd], None]) -> None:
        self._report = report

    def submit(self, order: LoadOrder | Unload | Resize) -> None:
        self._orders.append(order)
        if len(self._orders) == 1:
            self._begin()

    def stop(self, timeout_s: float) -> bool:  # noqa: ARG002  simulated time does not pass here
        return True

    def _begin(self) -> None:
        """Start the first order; what takes no time is done at once."""
        while self._orders:
            order = self._orders[0]
            if isinstance(order, LoadOrder):
                self._timeline.after(self._pool.seconds(order.spec), lambda order=order: self._loaded(order))
                return
            self._orders.pop(0)
            if isinstance(order, Resize):
                self._pool.resize(order.budget_bytes)
            else:
                for expert in order.experts:
                    self._pool.unload(expert)

    def _loaded(self, order: LoadOrder) -> None:
        load_ms = self._pool.seconds(order.spec) * 1000.0
        try:
            done = self._pool.load(order.spec, order.load.evict)
            end = LoadEnd(order.load, order.spec, done.bytes, load_ms, done.tier)
        except ExpertError as error:
            end = LoadEnd(order.load, order.spec, 0, load_ms, "disk", str(error))
        self._orders.pop(0)
        self._report(end)
        self._begin()


class FakeExecutor:
    """A batch of n images takes `k_s` · n + `b_s` simulated seconds; what it answers is a function's business."""

    def __init__(
        self,
        facts: ExecutorFacts,
        pool: FakePool,
        timeline: Timeline,
        answer: AnswerOf,
        k_s: float = 0.01,
        b_s: float = 0.01,
    ) -> None:
        self.facts = facts
        self._pool = pool
        self._timeline = timeline
        self._answer = answer
        self._k_s, self._b_s = k_s, b_s
        self._report: Callable[[BatchReport], None] = lambda _report: None

    def start(self, report: Callable[[BatchReport], None]) -> None:
        self._report = report

    def submit(self, order: BatchOrder) -> None:
        started_s = self._timeline.now()
        self._timeline.after(self._k_s * len(order.images) + self._b_s, lambda: self._ran(order, started_s))

    def stop(self, timeout_s: float) -> bool:  # noqa: ARG002  simulated time does not pass here
        return True

    def _ran(self, order: BatchOrder, started_s: float) -> None:
        results: list[Answered | Unanswered] = []
        for image in order.images:
            try:
                is_current = self._pool.slot(order.spec.expert) == order.spec
                answer = self._answer(order.spec, image) if is_current else Unanswered("expert_failed", "old weights")
            except ExpertError as error:
                answer = Unanswered("expert_failed", str(error))
            results.append(answer if isinstance(answer, Unanswered) else Answered(answer, (100, 100)))
        ended_s = self._timeline.now()
        infer_ms = (ended_s - started_s) * 1000.0
        self._report(BatchReport(self.facts.executor, order.batch_id, tuple(results), started_s, ended_s, infer_ms))
