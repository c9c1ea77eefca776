"""A simulated device: the executor and the loader contract without threads, weights or waiting.

Everything happens on a `SimulatedClock`, whose clock jumps from event to event, so that a run is exact and repeatable.
The pool keeps the real one's promises (never above its budget), so that a policy that would overbook is caught.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from daemon.dispatch.channels import WaitingLine, copy_channel
from daemon.dispatch.orders import Answered, BatchOrder, BatchReport, ImageOrder, LoadEnd, LoadOrder, Unanswered
from daemon.errors import is_device_error
from daemon.policy.actions import Load, Resize, Unload
from daemon.policy.request import ExecutorFacts, PoolId, RequestId
from experts.errors import ExpertError
from experts.spec import Answer, ExpertId, ExpertSpec

#: What an expert says of an image.
AnswerOf = Callable[[ExpertSpec, ImageOrder], Answer | Unanswered]


class SimulatedClock:
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
class SimulatedLoad:
    bytes: int
    load_ms: float
    tier: Literal["ram", "disk"] = "disk"


class SimulatedPool:
    """Residents by name only. `broken` experts fail to load, as a damaged file does, or a lost device ("CUDA error").

    `load_s` is the time of a load from disk, `copy_s` that of one from another pool.
    """

    def __init__(
        self,
        budget_bytes: int,
        load_s: Callable[[ExpertSpec], float] = lambda _spec: 0.0,
        copy_s: Callable[[ExpertSpec], float] = lambda _spec: 0.0,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.broken: dict[ExpertId, str] = {}
        self._load_s = load_s
        self._copy_s = copy_s
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

    def seconds(self, spec: ExpertSpec, source: "SimulatedPool | None" = None) -> float:
        """How long a load of `spec` takes."""
        return self._load_s(spec) if source is None else self._copy_s(spec)

    def load(
        self, spec: ExpertSpec, evict: tuple[ExpertId, ...] = (), source: "SimulatedPool | None" = None
    ) -> SimulatedLoad:
        for expert in evict:
            self._resident.pop(expert, None)
        if source is not None and spec.expert not in source.resident():
            raise ExpertError(spec.expert, "left the pool that it was to be copied from")
        if spec.expert in self.broken:
            raise ExpertError(spec.expert, self.broken[spec.expert], spec.file)
        if spec.expert in self._resident:
            raise ExpertError(spec.expert, "is already in the pool")
        free_bytes = self.budget_bytes - self.used_bytes
        if spec.weights_bytes > free_bytes:
            raise ExpertError(spec.expert, f"needs {spec.weights_bytes} bytes, {free_bytes} are free")
        self._resident[spec.expert] = spec
        tier = "disk" if source is None else "ram"
        return SimulatedLoad(spec.weights_bytes, self.seconds(spec, source) * 1000.0, tier)

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


class SimulatedChannel:
    """One simulated transfer at a time, as daemon.dispatch.channels.Channel orders them."""

    def __init__(self, timeline: SimulatedClock) -> None:
        self._timeline = timeline
        self._waiting: WaitingLine[tuple[Load, float, Callable[[], None]]] = WaitingLine()
        self.under_way: tuple[Load, float] | None = None

    def submit(self, load: Load, seconds: float, done: Callable[[], None]) -> None:
        """Call `done` at the end of a transfer of `seconds`, which begins when its turn comes."""
        self._waiting.put(load.cause, (load, seconds, done))
        if self.under_way is None:
            self._begin()

    def give_up(self, load: Load) -> None:
        if self.under_way is not None and self.under_way[0] == load:
            self._begin()

    def _begin(self) -> None:
        transfer = self._waiting.take()
        self.under_way = None
        if transfer is not None:
            load, seconds, done = transfer
            begun = self.under_way = (load, self._timeline.now())
            self._timeline.after(seconds, lambda: self._end(begun, done))

    def _end(self, begun: tuple[Load, float], done: Callable[[], None]) -> None:
        if self.under_way is not begun:
            done()  # it was given up
            return
        self.under_way = None
        done()
        if self.under_way is None:
            self._begin()


class SimulatedChannels:
    """The channels of a simulated machine, as daemon.dispatch.channels.Channels names them."""

    def __init__(self, timeline: SimulatedClock) -> None:
        self._timeline = timeline
        self.disk = SimulatedChannel(timeline)
        self._copying: dict[str, SimulatedChannel] = {}

    def copying_to(self, pool: PoolId) -> SimulatedChannel:
        name = copy_channel(pool)
        channel = self._copying.get(name)
        if channel is None:
            channel = self._copying[name] = SimulatedChannel(self._timeline)
        return channel


class SimulatedLoader:
    """Loads take their pool's simulated time on the channels; evictions and budgets are carried out at once.

    A load of an expert of `hangs_s` takes so many seconds more, as one from a disk that does not answer.
    """

    def __init__(
        self,
        pool_id: PoolId,
        pool: SimulatedPool,
        timeline: SimulatedClock,
        channels: SimulatedChannels | None = None,
        pools: Mapping[PoolId, SimulatedPool] | None = None,
    ) -> None:
        self.pool = pool_id
        self._pool = pool
        self._pools = pools or {}
        channels = channels or SimulatedChannels(timeline)
        self._from_disk, self._from_memory = channels.disk, channels.copying_to(pool_id)
        self.hangs_s: dict[ExpertId, float] = {}
        self._report: Callable[[LoadEnd], None] = lambda _end: None

    def start(self, report: Callable[[LoadEnd], None]) -> None:
        self._report = report

    def submit(self, order: LoadOrder | Unload | Resize) -> None:
        if isinstance(order, Resize):
            self._pool.resize(order.budget_bytes)
            return
        for expert in order.load.evict if isinstance(order, LoadOrder) else order.experts:
            self._pool.unload(expert)
        if isinstance(order, LoadOrder):
            source = None if order.load.source is None else self._pools[order.load.source]
            channel = self._from_disk if source is None else self._from_memory
            seconds = self._pool.seconds(order.spec, source)
            seconds += self.hangs_s.get(order.spec.expert, 0.0)
            channel.submit(order.load, seconds, lambda: self._loaded(order, source, seconds))

    def under_way(self) -> list[tuple[Load, float]]:
        begun = (self._from_disk.under_way, self._from_memory.under_way)
        return [one for one in begun if one is not None and one[0].pool == self.pool]

    def give_up(self, load: Load) -> None:
        (self._from_disk if load.source is None else self._from_memory).give_up(load)

    def stop(self, timeout_s: float) -> bool:  # noqa: ARG002  simulated time does not pass here
        return True

    def _loaded(self, order: LoadOrder, source: SimulatedPool | None, seconds: float) -> None:
        try:
            done = self._pool.load(order.spec, source=source)
            end = LoadEnd(order.load, order.spec, done.bytes, done.load_ms, done.tier)
        except ExpertError as error:
            end = LoadEnd(order.load, order.spec, 0, seconds * 1000.0, "disk", str(error), is_device_error(error))
        self._report(end)


class SimulatedExecutor:
    """A batch of n images takes `k_s` · n + `b_s` simulated seconds; what it answers is a function's business.

    `hangs(order)` says how many seconds more a batch takes, and the image whose decoding does not end, if it is that.
    """

    def __init__(
        self,
        facts: ExecutorFacts,
        pool: SimulatedPool,
        timeline: SimulatedClock,
        answer: AnswerOf,
        k_s: float = 0.01,
        b_s: float = 0.01,
    ) -> None:
        self.facts = facts
        self._pool = pool
        self._timeline = timeline
        self._answer = answer
        self._k_s, self._b_s = k_s, b_s
        self.hangs: Callable[[BatchOrder], tuple[float, RequestId | None]] = lambda _order: (0.0, None)
        self._preparing: RequestId | None = None
        self._report: Callable[[BatchReport], None] = lambda _report: None

    def start(self, report: Callable[[BatchReport], None]) -> None:
        self._report = report

    def submit(self, order: BatchOrder) -> None:
        started_s = self._timeline.now()
        hangs_s, self._preparing = self.hangs(order)
        self._timeline.after(self._k_s * len(order.images) + self._b_s + hangs_s, lambda: self._ran(order, started_s))

    def give_up(self) -> RequestId | None:
        return self._preparing

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
