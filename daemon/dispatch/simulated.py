"""Simulated devices: what pools promise (pool.py), without torch, weights or waiting.

A `SimulatedClock` jumps from event to event, so that a run is exact and repeatable. The memory never exceeds its
budget, so that a policy that would overbook is caught.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from daemon.dispatch.channels import WaitingLine
from daemon.dispatch.pool import Batch, Fault, LoadEnd, StoredImage
from daemon.errors import is_device_error
from daemon.policy.actions import Load
from daemon.policy.request import PoolId, device_of
from experts.errors import ExpertError
from experts.spec import Answer, ExpertId, ExpertSpec, LoadReport

AnswerOf = Callable[[ExpertSpec, StoredImage], Answer | Fault]


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
        self._waiting.add_transfer(load.cause, (load, seconds, done))
        if self.under_way is None:
            self._begin()

    def abandon(self, load: Load) -> None:
        if self.under_way is not None and self.under_way[0] == load:
            self._begin()

    def _begin(self) -> None:
        turn = self._waiting.next_transfer()
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


class SimulatedMemory:
    """Residents by name only. `broken` experts fail to load. `read(spec)` may take real time, or raise ExpertError."""

    def __init__(self, budget_bytes: int, read: Callable[[ExpertSpec], None] = lambda _spec: None) -> None:
        self.budget_bytes = budget_bytes
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

    def load(self, spec: ExpertSpec, *, source: "SimulatedMemory | None" = None) -> LoadReport:
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


#: Where a load passes: channels one after the other, each with its seconds.
Route = Sequence[tuple[SimulatedChannel, float]]


class SimulatedPool:
    """A pool whose loads pass the channels of their route, and whose batches take simulated seconds.

    A batch of n images takes `k_s` · n + `b_s` seconds of its processor. An expert in `hangs_s` takes that many seconds
    longer to load; `hangs(batch)` returns the extra seconds of a batch, and the image whose decoding hangs, if that is
    the cause.
    """

    def __init__(  # noqa: PLR0913  a task's machine sets each
        self,
        pool: PoolId,
        memory: SimulatedMemory,
        clock: SimulatedClock,
        route: Callable[[Load, ExpertSpec], Route],
        answer: AnswerOf,
        *,
        sources: Mapping[PoolId, SimulatedMemory] | None = None,
        costs: Callable[[ExpertSpec], tuple[float, float]] = lambda _spec: (0.01, 0.01),
        processor: SimulatedProcessor | None = None,
        on_load: Callable[[Load], None] = lambda _load: None,
        on_batch: Callable[[Batch, float], None] = lambda _batch, _work_s: None,
        carry: Callable[[int, Callable[[], None]], None] = lambda _images, done: done(),
    ) -> None:
        """`costs(spec)` are k_s and b_s; without a `processor` each batch has its own.

        `sources` are the memories that bytes can be copied from. `on_load` and `on_batch` are called at the start of
        each. `carry(images, done)` brings a batch's images to the device and calls `done`: the executor waits for them.
        """
        self.pool, self.device, self.memory = pool, device_of(pool), memory
        self._clock, self._route, self._answer, self._costs = clock, route, answer, costs
        self._sources = sources or {}
        self._run = processor.run if processor else clock.after
        self._on_load, self._on_batch, self._carry = on_load, on_batch, carry
        self._routes: dict[Load, Route] = {}
        self.hangs_s: dict[ExpertId, float] = {}
        self.hangs: Callable[[Batch], tuple[float, int | None]] = lambda _batch: (0.0, None)

    @property
    def budget_bytes(self) -> int:
        return self.memory.budget_bytes

    def start(self) -> None:
        """Return at once: a simulated pool has no threads."""

    def stop(self, timeout_s: float) -> bool:  # noqa: ARG002  simulated time does not pass here
        return True

    # Loads

    def load(self, load: Load, spec: ExpertSpec, done: Callable[[LoadEnd], None]) -> None:
        self._on_load(load)
        self.unload(load.evict)
        (first, seconds), *rest = self._route(load, spec)
        self._routes[load] = route = ((first, seconds + self.hangs_s.get(load.expert, 0.0)), *rest)
        self._pass(load, list(route), lambda: self._loaded(load, spec, done))

    def unload(self, experts: Iterable[ExpertId]) -> None:
        for expert in experts:
            self.memory.unload(expert)

    def resize(self, budget_bytes: int) -> None:
        self.memory.resize(budget_bytes)

    def loads_under_way(self) -> list[tuple[Load, float]]:
        channels = dict.fromkeys(channel for route in self._routes.values() for channel, _ in route)
        begun = [channel.under_way for channel in channels]
        return [each for each in begun if each is not None and each[0].pool == self.pool]

    def abandon_load(self, load: Load) -> None:
        for channel, _ in self._routes.get(load, ()):
            channel.abandon(load)

    def _pass(self, load: Load, route: list[tuple[SimulatedChannel, float]], done: Callable[[], None]) -> None:
        if route:
            channel, seconds = route.pop(0)
            channel.transfer(load, seconds, lambda: self._pass(load, route, done))
        else:
            done()

    def _loaded(self, load: Load, spec: ExpertSpec, done: Callable[[LoadEnd], None]) -> None:
        load_ms = sum(seconds for _, seconds in self._routes.pop(load)) * 1000.0
        try:
            loaded = self.memory.load(spec, source=None if load.source is None else self._sources[load.source])
            end = LoadEnd(load, spec, loaded.bytes, load_ms, loaded.tier)
        except ExpertError as error:
            end = LoadEnd(load, spec, 0, load_ms, "disk", str(error), is_device_error(error))
        done(end)

    # Batches

    def run(self, batch: Batch, done: Callable[[Batch], None]) -> None:
        batch.started_s = self._clock.now()
        hangs_s, batch.decoding = self.hangs(batch)
        k_s, b_s = self._costs(batch.spec)
        work_s = k_s * len(batch.images) + b_s + hangs_s
        self._on_batch(batch, work_s)
        self._carry(len(batch.images), lambda: self._run(work_s, lambda: self._ran(batch, done)))

    def abandon_batch(self, batch: Batch) -> None:
        """Nothing to do: an executor runs any number of batches."""

    def _ran(self, batch: Batch, done: Callable[[Batch], None]) -> None:
        batch.ended_s = self._clock.now()
        batch.infer_ms = (batch.ended_s - batch.started_s) * 1000.0
        try:
            resident = self.memory.slot(batch.spec.expert).spec
        except ExpertError as error:
            batch.fail(str(error))
        else:
            if resident != batch.spec:
                batch.fail("old weights")
            else:
                batch.answers = [
                    self._answer(head or batch.spec, each) for head, each in zip(batch.heads, batch.images, strict=True)
                ]
                batch.sizes = [(100, 100)] * len(batch.images)
        done(batch)
