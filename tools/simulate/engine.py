"""Simulated time: the real scheduler on simulated channels and processors. Exact, repeatable, no threads."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from daemon.dispatch.channels import WaitingLine
from daemon.policy.actions import Load, Run, Wait
from daemon.policy.presets import Tuning, preset
from daemon.policy.request import RAM, ExecutorId, Request, RequestId
from daemon.policy.scheduler import Scheduler
from experts.spec import ArchitectureId, ExpertId
from tools.simulate.world import Channel, Image, Machine, Task


@dataclass(frozen=True, slots=True)
class Span:
    """Something on the timeline: a load on a channel or a batch on an executor, seconds."""

    lane: str
    kind: str
    expert: ExpertId
    images: int
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Outcome:
    """What happened to a task. `waits_s`: from arrival to the start of the first expert's batch, in order of start."""

    policy: str
    images: int
    makespan_s: float = 0.0
    loads: int = 0
    disk_loads: int = 0
    wanted_evictions: int = 0
    answered: int = 0
    expired: int = 0
    late: int = 0
    #: Requests that were computed, and those of them whose image was answered too late or not at all.
    steps: int = 0
    wasted_steps: int = 0
    waits_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


class StuckError(RuntimeError):
    """Images wait and nothing will ever happen: a defect of the policy."""


class _Clock:
    """Events by time; at one time, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self.events, (when_s, self._serial, do))


class _Transfers:
    """One channel: one transfer at a time, in the daemon's order; what is fixed passes beside the channel."""

    def __init__(self, channel: Channel, clock: _Clock, note: Callable[[Span], None]) -> None:
        self._channel = channel
        self._clock = clock
        self._note = note
        self._waiting: WaitingLine[tuple[Load, float, Callable[[], None]]] = WaitingLine()
        self._busy = False

    def move(self, load: Load, seconds: float, done: Callable[[], None]) -> None:
        """Keep the channel busy for `seconds` when it is this load's turn, then call `done`."""
        self._waiting.put(load.cause, (load, seconds, done))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        turn = self._waiting.take()
        if turn is None:
            return
        load, seconds, done = turn
        self._busy = True
        begin_s = self._clock.now_s
        end_s = begin_s + seconds

        def moved() -> None:
            self._busy = False
            self._note(Span(self._channel.name, load.cause, load.expert, 0, begin_s, end_s))
            self._clock.at(self._clock.now_s + self._channel.fixed_s, done)
            self._next()

        self._clock.at(end_s, moved)


class _Processor:
    """m batches at once each run at min(1, concurrency / m): processor sharing, in the batches' own seconds."""

    def __init__(self, concurrency: float, clock: _Clock) -> None:
        self._concurrency = concurrency
        self._clock = clock
        self._served_s = 0.0
        self._since_s = 0.0
        self._active: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._version = 0

    def run(self, work_s: float, done: Callable[[], None]) -> None:
        self._advance()
        self._serial += 1
        heapq.heappush(self._active, (self._served_s + work_s, self._serial, done))
        self._plan()

    def _rate(self) -> float:
        return min(1.0, self._concurrency / len(self._active)) if self._active else 1.0

    def _advance(self) -> None:
        self._served_s += (self._clock.now_s - self._since_s) * self._rate()
        self._since_s = self._clock.now_s

    def _plan(self) -> None:
        self._version += 1
        if self._active:
            version = self._version
            left_s = max(0.0, self._active[0][0] - self._served_s) / self._rate()
            self._clock.at(self._clock.now_s + left_s, lambda: self._ended(version))

    def _ended(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        _, _, done = heapq.heappop(self._active)
        self._plan()
        done()


class Simulation:
    """One task on one machine under one policy. `prefilled`: the initial fill is over before the first image comes."""

    def __init__(
        self,
        machine: Machine,
        task: Task,
        policy: str,
        *,
        tuning: Tuning | None = None,
        prefilled: bool = True,
        keep_spans: bool = False,
    ) -> None:
        self._machine, self._images = machine, task.images
        self._clock = _Clock()
        self.scheduler = Scheduler(
            task.experts, machine.pools, machine.executors, preset(policy), tuning, machine.matrix
        )
        self.outcome = Outcome(policy, len(task.images))
        self._prefilled, self._keep_spans = prefilled, keep_spans
        self._facts = {facts.expert: facts for facts in task.experts}
        self._costs = {(row.device, row.architecture): (row.k_s, row.b_s) for row in machine.matrix}
        self._device = {facts.pool: facts.device for facts in machine.pools}
        self._pool_of = {facts.executor: facts.pool for facts in machine.executors}
        self._processors = {device: _Processor(value, self._clock) for device, value in machine.concurrency.items()}
        self._channels: dict[Channel, _Transfers] = {}
        self._idle: dict[ExecutorId, None] = dict.fromkeys(self._pool_of)
        self._chains: dict[RequestId, tuple[Image, int]] = {}
        self._queued: dict[ExpertId, int] = {}
        self._next_id = 0
        self._left = len(task.images)
        self._wake_s: float | None = None

    def run(self) -> Outcome:
        """Play the whole task. Raises StuckError."""
        if self._prefilled:
            self._fill()
        clock, arrivals = self._clock, deque(self._images)
        while self._left:
            next_s = clock.events[0][0] if clock.events else None
            if arrivals and (next_s is None or arrivals[0].arrived_s <= next_s):
                clock.now_s = arrivals[0].arrived_s
                while arrivals and arrivals[0].arrived_s <= clock.now_s:
                    self._arrive(arrivals.popleft(), 0)
            elif next_s is not None:
                clock.now_s = next_s
                while clock.events and clock.events[0][0] <= next_s:
                    heapq.heappop(clock.events)[2]()
            else:
                raise StuckError(f"{self._left} images wait for ever: {self.scheduler.snapshot().queued}")
            self._decide()
        return self.outcome

    def _fill(self) -> None:
        """Without time passing; it counts as no load."""
        for facts in self._machine.pools:
            while isinstance(load := self.scheduler.next_load(facts.pool, 0.0), Load):
                self.scheduler.load_done(load, 0.0)

    def _arrive(self, image: Image, step: int) -> None:
        now_s = self._clock.now_s
        self._next_id += 1
        number, expert = RequestId(self._next_id), image.chain[step]
        refused = self.scheduler.arrive(Request(number, expert, now_s, image.deadline_s, step), now_s)
        if refused is not None:
            raise StuckError(refused)
        self._chains[number] = (image, step)
        self._queued[expert] = self._queued.get(expert, 0) + 1

    def _decide(self) -> None:
        now_s, scheduler = self._clock.now_s, self.scheduler
        for request in scheduler.expire(now_s):
            self._queued[request.expert] -= 1
            outcome_step = self._chains.pop(request.request_id)[1]
            self.outcome.wasted_steps += outcome_step
            self.outcome.expired += 1
            self._end()
        wakes: list[float] = []
        for facts in self._machine.pools:
            while not isinstance(action := scheduler.next_load(facts.pool, now_s), Wait):
                if isinstance(action, Load):
                    self._load(action)
            if action.until_s is not None:
                wakes.append(action.until_s)
        for executor in tuple(self._idle):
            action = scheduler.next_action(executor, now_s)
            if isinstance(action, Run):
                self._run(action)
            elif action.until_s is not None:
                wakes.append(action.until_s)
        if wakes:
            self._wake(min(wakes))

    def _wake(self, when_s: float) -> None:
        """Decide again at `when_s`; one such event is enough."""
        if when_s > self._clock.now_s and (self._wake_s is None or when_s < self._wake_s):
            self._wake_s = when_s
            self._clock.at(when_s, lambda: self._woken(when_s))

    def _woken(self, when_s: float) -> None:
        if self._wake_s == when_s:
            self._wake_s = None

    # Loads

    def _load(self, load: Load) -> None:
        outcome, begin_s = self.outcome, self._clock.now_s
        if load.cause != "startup":
            outcome.loads += load.pool != RAM
            outcome.disk_loads += load.source is None
        outcome.wanted_evictions += sum(1 for victim in load.evict if self._queued.get(victim, 0))
        device = self._device[load.pool]
        way = self._machine.from_disk[device] if load.source is None else self._machine.from_ram[device]
        self._pass(load, list(way), begin_s)

    def _pass(self, load: Load, way: list[Channel], begin_s: float) -> None:
        """Through the channels one after the other."""
        if not way:
            self.scheduler.load_done(load, self._clock.now_s - begin_s)
            return
        channel = way.pop(0)
        transfers = self._channels.get(channel)
        if transfers is None:
            transfers = self._channels[channel] = _Transfers(channel, self._clock, self._note)
        transfers.move(load, self._seconds(load, channel), lambda: self._pass(load, way, begin_s))

    def _seconds(self, load: Load, channel: Channel) -> float:
        facts, measured = self._facts[load.expert], self._machine.load_s
        if measured is None:
            return facts.weights_bytes / channel.bytes_per_s
        disk_s, ram_s = measured.get((self._device[load.pool], facts.architecture), (0.0, 0.0))
        return disk_s if load.source is None else ram_s

    # Batches

    def _run(self, run: Run) -> None:
        now_s, outcome = self._clock.now_s, self.outcome
        del self._idle[run.executor]
        self._queued[run.expert] -= len(run.batch)
        for request in run.batch:
            if request.step == 0:
                outcome.waits_s.append(now_s - self._chains[request.request_id][0].arrived_s)
        device = self._device[self._pool_of[run.executor]]
        k_s, b_s = self._costs[device, self._architecture(run.expert)]
        work_s = k_s * len(run.batch) + b_s
        outcome.busy_s[device] = outcome.busy_s.get(device, 0.0) + work_s
        self._processors[device].run(work_s, lambda: self._ran(run, now_s))

    def _ran(self, run: Run, begin_s: float) -> None:
        now_s = self._clock.now_s
        self._note(Span(str(run.executor), "batch", run.expert, len(run.batch), begin_s, now_s))
        self._idle[run.executor] = None
        self.scheduler.batch_done(run.executor, now_s - begin_s)
        self.outcome.steps += len(run.batch)
        for request in run.batch:
            image, step = self._chains.pop(request.request_id)
            if step + 1 < len(image.chain):
                self._arrive(image, step + 1)
                continue
            self.outcome.answered += 1
            self.outcome.latencies_s.append(now_s - image.arrived_s)
            if image.deadline_s is not None and now_s > image.deadline_s:
                self.outcome.late += 1
                self.outcome.wasted_steps += len(image.chain)
            self._end()

    def _end(self) -> None:
        self._left -= 1
        self.outcome.makespan_s = self._clock.now_s

    def _architecture(self, expert: ExpertId) -> ArchitectureId:
        return self._facts[expert].architecture

    def _note(self, span: Span) -> None:
        if self._keep_spans:
            self.outcome.spans.append(span)


def simulate(
    machine: Machine, task: Task, policy: str, *, tuning: Tuning | None = None, prefilled: bool = True
) -> Outcome:
    """Play `task` under `policy`. Raises StuckError."""
    return Simulation(machine, task, policy, tuning=tuning, prefilled=prefilled).run()
