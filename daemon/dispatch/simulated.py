"""Simulated devices: what executors and loaders promise (orders.py), without torch, weights or waiting.

A `SimulatedClock` jumps from event to event, so that a run is exact and repeatable. The pool never exceeds its budget,
so that a policy that would overbook is caught.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from daemon.dispatch.channels import WaitingLine
from daemon.dispatch.orders import Answered, BatchOrder, BatchReport, ImageOrder, LoadEnd, LoadOrder, Unanswered
from daemon.errors import is_device_error
from daemon.policy.actions import Load, Resize, Unload
from daemon.policy.request import ExecutorFacts, PoolId, RequestId
from experts.errors import ExpertError
from experts.spec import Answer, ExpertId, ExpertSpec, LoadReport

AnswerOf = Callable[[ExpertSpec, ImageOrder], Answer | Unanswered]


class SimulatedClock:
    """Simulated seconds. Events of the same time happen in the order of scheduling."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def now(self) -> float:
        return self._now_s

    @property
    def next_s(self) -> float | None:
        return self._events[0][0] if self._events else None

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self.now() + seconds, self._serial, do))

    def step(self, until_s: float | None = None) -> bool:
        """Jump to the next event, or to `until_s` if earlier, and do all that is due then; False without events."""
        next_s = self.next_s
        if next_s is None or (until_s is not None and until_s < next_s):
            if until_s is None:
                return False
            self._now_s = max(self._now_s, until_s)
            return True
        self._now_s = next_s
        while self._events and self._events[0][0] <= next_s:
            heapq.heappop(self._events)[2]()
        return True


class SimulatedChannel:
    """One transfer at a time, in the order of daemon.dispatch.channels; `fixed_s` passes beside it for each load."""

    def __init__(
        self,
        clock: SimulatedClock,
        name: str = "",
        fixed_s: float = 0.0,
        on_transfer: Callable[[str, Load, float], None] = lambda _name, _load, _begun_s: None,
    ) -> None:
        """`on_transfer(name, load, begun_s)` is called at the end of each transfer."""
        self._clock = clock
        self._name = name
        self._fixed_s = fixed_s
        self._on_transfer = on_transfer
        self._waiting: WaitingLine[tuple[Load, float, Callable[[], None]]] = WaitingLine()
        self.under_way: tuple[Load, float] | None = None

    def transfer(self, load: Load, seconds: float, done: Callable[[], None]) -> None:
        self._waiting.put(load.cause, (load, seconds, done))
        if self.under_way is None:
            self._begin()

    def give_up(self, load: Load) -> None:
        if self.under_way is not None and self.under_way[0] == load:
            self._begin()

    def _begin(self) -> None:
        turn = self._waiting.take()
        self.under_way = None
        if turn is not None:
            load, seconds, done = turn
            begun = self.under_way = (load, self._clock.now())
            self._clock.after(seconds, lambda: self._end(begun, done))

    def _end(self, begun: tuple[Load, float], done: Callable[[], None]) -> None:
        load, begun_s = begun
        self._on_transfer(self._name, load, begun_s)
        if self.under_way is begun:  # else it was given up, and others have gone on
            self._begin()
        if self._fixed_s:
            self._clock.after(self._fixed_s, done)
        else:
            done()


class SimulatedNetwork(SimulatedChannel):
    """One uplink to other PCs: transfers share its bandwidth equally, and each direction takes `latency_s`."""

    def __init__(
        self,
        clock: SimulatedClock,
        bytes_per_s: float,
        latency_s: float,
        on_transfer: Callable[[str, Load, float], None] = lambda _name, _load, _begun_s: None,
    ) -> None:
        super().__init__(clock, "network", latency_s, on_transfer)
        self._uplink = SimulatedProcessor(clock, 1.0)
        self._bytes_per_s = bytes_per_s
        self.sent_bytes = 0

    def transfer(self, load: Load, seconds: float, done: Callable[[], None]) -> None:
        self.sent_bytes += round(seconds * self._bytes_per_s)
        begun = (load, self._clock.now())
        self._uplink.run(seconds, lambda: self._end(begun, done))

    def send(self, size_bytes: int, done: Callable[[], None]) -> None:
        """Call `done` when a batch's images have arrived; the latency of the answer is included."""
        self.sent_bytes += size_bytes
        self._uplink.run(size_bytes / self._bytes_per_s, lambda: self._clock.after(2 * self._fixed_s, done))


class SimulatedProcessor:
    """m batches at once each run at min(1, concurrency / m): processor sharing, in the batches' own seconds."""

    def __init__(self, clock: SimulatedClock, concurrency: float) -> None:
        self._clock = clock
        self._concurrency = concurrency
        self._served_s = 0.0
        self._since_s = clock.now()
        self._active: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._version = 0

    def run(self, work_s: float, done: Callable[[], None]) -> None:
        """Call `done` after `work_s` seconds of undivided processor time."""
        self._advance()
        self._serial += 1
        heapq.heappush(self._active, (self._served_s + work_s, self._serial, done))
        self._plan()

    def _rate(self) -> float:
        return min(1.0, self._concurrency / len(self._active)) if self._active else 1.0

    def _advance(self) -> None:
        now = self._clock.now()
        self._served_s += (now - self._since_s) * self._rate()
        self._since_s = now

    def _plan(self) -> None:
        self._version += 1
        if self._active:
            version = self._version
            left_s = max(0.0, self._active[0][0] - self._served_s) / self._rate()
            self._clock.after(left_s, lambda: self._ended(version))

    def _ended(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        _, _, done = heapq.heappop(self._active)
        self._plan()
        done()


@dataclass(frozen=True, slots=True)
class SimulatedSlot:
    spec: ExpertSpec


class SimulatedPool:
    """Residents by name only. `broken` experts fail to load. `read(spec)` may take real time, or raise ExpertError."""

    def __init__(
        self, budget_bytes: int, device: str = "cpu", read: Callable[[ExpertSpec], None] = lambda _spec: None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.device = device
        self.broken: dict[ExpertId, str] = {}
        self._read = read
        self._resident: dict[ExpertId, ExpertSpec] = {}

    @property
    def used_bytes(self) -> int:
        return sum(spec.weights_bytes for spec in self._resident.values())

    def resident(self) -> tuple[ExpertId, ...]:
        return tuple(self._resident)

    def slot(self, expert: ExpertId) -> SimulatedSlot:
        if expert not in self._resident:
            raise ExpertError(expert, "is not resident")
        return SimulatedSlot(self._resident[expert])

    def load(
        self, spec: ExpertSpec, evict: tuple[ExpertId, ...] = (), source: "SimulatedPool | None" = None
    ) -> LoadReport:
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
        begun_s = time.monotonic()
        self._read(spec)
        self._resident[spec.expert] = spec
        load_ms = (time.monotonic() - begun_s) * 1000.0
        return LoadReport(spec.weights_bytes, load_ms, "disk" if source is None else "ram")

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


#: Where a load passes: channels one after the other, each with its seconds.
Route = Sequence[tuple[SimulatedChannel, float]]


class SimulatedLoader:
    """Loads pass the channels of their route. An expert in `hangs_s` takes that many seconds longer."""

    def __init__(
        self,
        pool_id: PoolId,
        pool: SimulatedPool,
        route: Callable[[LoadOrder], Route],
        pools: Mapping[PoolId, SimulatedPool] | None = None,
        on_load: Callable[[Load], None] = lambda _load: None,
    ) -> None:
        """`pools` are those that bytes can be copied from; `on_load` is called when a load comes in."""
        self.pool = pool_id
        self._pool = pool
        self._route = route
        self._pools = pools or {}
        self._on_load = on_load
        self._routes: dict[Load, Route] = {}
        self.hangs_s: dict[ExpertId, float] = {}
        self._report: Callable[[LoadEnd], None] = lambda _end: None

    def start(self, report: Callable[[LoadEnd], None]) -> None:
        self._report = report

    def apply(self, change: LoadOrder | Unload | Resize) -> None:
        if isinstance(change, Resize):
            self._pool.resize(change.budget_bytes)
            return
        if isinstance(change, Unload):
            self._unload(change.experts)
            return
        load = change.load
        self._on_load(load)
        self._unload(load.evict)
        (first, seconds), *rest = self._route(change)
        self._routes[load] = route = ((first, seconds + self.hangs_s.get(load.expert, 0.0)), *rest)
        self._pass(change, list(route))

    def under_way(self) -> list[tuple[Load, float]]:
        channels = dict.fromkeys(channel for route in self._routes.values() for channel, _ in route)
        begun = [channel.under_way for channel in channels]
        return [each for each in begun if each is not None and each[0].pool == self.pool]

    def give_up(self, load: Load) -> None:
        for channel, _ in self._routes.get(load, ()):
            channel.give_up(load)

    def stop(self, timeout_s: float) -> bool:  # noqa: ARG002  simulated time does not pass here
        return True

    def _unload(self, experts: Iterable[ExpertId]) -> None:
        for expert in experts:
            self._pool.unload(expert)

    def _pass(self, order: LoadOrder, route: list[tuple[SimulatedChannel, float]]) -> None:
        if route:
            channel, seconds = route.pop(0)
            channel.transfer(order.load, seconds, lambda: self._pass(order, route))
        else:
            self._loaded(order)

    def _loaded(self, order: LoadOrder) -> None:
        load = order.load
        load_ms = sum(seconds for _, seconds in self._routes.pop(load)) * 1000.0
        try:
            source = None if load.source is None else self._pools[load.source]
            loaded = self._pool.load(order.spec, source=source)
            end = LoadEnd(load, order.spec, loaded.bytes, load_ms, loaded.tier)
        except ExpertError as error:
            end = LoadEnd(load, order.spec, 0, load_ms, "disk", str(error), is_device_error(error))
        self._report(end)


class SimulatedExecutor:
    """A batch of n images takes `k_s` · n + `b_s` simulated seconds of its processor; `answer` gives the answers.

    `hangs(order)` returns the extra seconds of a batch, and the image whose decoding hangs, if that is the cause.
    """

    def __init__(
        self,
        facts: ExecutorFacts,
        pool: SimulatedPool,
        clock: SimulatedClock,
        answer: AnswerOf,
        costs: Callable[[ExpertSpec], tuple[float, float]] = lambda _spec: (0.01, 0.01),
        processor: SimulatedProcessor | None = None,
        on_batch: Callable[[BatchOrder, float], None] = lambda _order, _work_s: None,
        carry: Callable[[int, Callable[[], None]], None] = lambda _images, done: done(),
    ) -> None:
        """`costs(spec)` are k_s and b_s; without a `processor` it has its own; `on_batch` is called when one begins.

        `carry(images, done)` brings a batch's images to the device and calls `done`: an executor waits for them.
        """
        self.facts = facts
        self._pool = pool
        self._clock = clock
        self._answer = answer
        self._costs = costs
        self._run = processor.run if processor else clock.after
        self._on_batch = on_batch
        self._carry = carry
        self.hangs: Callable[[BatchOrder], tuple[float, RequestId | None]] = lambda _order: (0.0, None)
        self._preparing: RequestId | None = None
        self._report: Callable[[BatchReport], None] = lambda _report: None

    def start(self, report: Callable[[BatchReport], None]) -> None:
        self._report = report

    def submit(self, order: BatchOrder) -> None:
        started_s = self._clock.now()
        hangs_s, self._preparing = self.hangs(order)
        k_s, b_s = self._costs(order.spec)
        work_s = k_s * len(order.images) + b_s + hangs_s
        self._on_batch(order, work_s)
        self._carry(len(order.images), lambda: self._run(work_s, lambda: self._ran(order, started_s)))

    def give_up(self) -> RequestId | None:
        return self._preparing

    def stop(self, timeout_s: float) -> bool:  # noqa: ARG002  simulated time does not pass here
        return True

    def _ran(self, order: BatchOrder, started_s: float) -> None:
        results = tuple(self._result(order.spec, image) for image in order.images)
        ended_s = self._clock.now()
        infer_ms = (ended_s - started_s) * 1000.0
        self._report(BatchReport(self.facts.executor, order.batch_id, results, started_s, ended_s, infer_ms))

    def _result(self, spec: ExpertSpec, image: ImageOrder) -> Answered | Unanswered:
        try:
            if self._pool.slot(spec.expert).spec != spec:
                return Unanswered("expert_failed", "old weights")
        except ExpertError as error:
            return Unanswered("expert_failed", str(error))
        answer = self._answer(image.head or spec, image)
        return answer if isinstance(answer, Unanswered) else Answered(answer, (100, 100))
