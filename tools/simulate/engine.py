"""Simulated time: the daemon's own drive and scheduler on simulated channels and processors. Exact, repeatable."""

from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

from daemon.dispatch.drive import Drive
from daemon.dispatch.flow import Chains, ImageAnswer
from daemon.dispatch.orders import BatchOrder, LoadOrder
from daemon.dispatch.simulated import (
    Route,
    SimulatedChannel,
    SimulatedClock,
    SimulatedExecutor,
    SimulatedLoader,
    SimulatedPool,
    SimulatedProcessor,
)
from daemon.dispatch.trace import Makeup
from daemon.policy.actions import Load
from daemon.policy.presets import Tuning
from daemon.policy.request import RAM, ExpertFacts, Request, RequestId
from daemon.records import Accepted, BatchDone, ExpertSwitch, JournalKey, Outcome, Pixels, QueueSample
from experts.spec import Answer, ExpertId, ExpertSpec, LayoutId
from tools.simulate.world import Image, SimulatedMachine, Task, TransferChannel

#: Nothing hangs here.
_NEVER_S = 1e12
_ANSWER = Answer(None, None)


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
class TaskOutcome:
    """The course of a task. `waits_s`: from arrival to the start of the first expert's batch, in order of start."""

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


class _TaskChains(Chains):
    """Each image goes through the chain that its task names: what a network would say of it is not known."""

    def __init__(self, images: tuple[Image, ...], clock: SimulatedClock, course: TaskOutcome) -> None:
        super().__init__(lambda _version: None, clock.now, clock.now)
        self._task, self._time, self._course = images, clock, course
        self._under_way: dict[RequestId, tuple[Accepted, int]] = {}
        self._last_request = 0
        self.queued: Counter[ExpertId] = Counter()

    def __len__(self) -> int:
        return len(self._under_way)

    def accepted(self, request_id: RequestId) -> Accepted:
        return self._under_way[request_id][0]

    def admit(self, accepted: Accepted) -> Request:
        return self._next(accepted, 0)

    def begun(self, order: BatchOrder) -> None:
        """Count a batch that begins, and how long its images have waited for their first."""
        self.queued[order.spec.expert] -= len(order.images)
        for image in order.images:
            accepted, step = self._under_way[image.request_id]
            if step == 0:
                self._course.waits_s.append(self._time.now() - self._image(accepted).arrived_s)

    def answered(self, answered: ImageAnswer, now: float) -> Request | Outcome:
        accepted, step = self._under_way.pop(answered.request_id)
        image = self._image(accepted)
        self._course.steps += 1
        if step + 1 < len(image.chain):
            return self._next(accepted, step + 1)
        self._course.answered += 1
        self._course.latencies_s.append(now - image.arrived_s)
        if image.deadline_s is not None and now > image.deadline_s:
            self._course.late += 1
            self._course.wasted_steps += len(image.chain)
        return Outcome(accepted.inspection_id, "pass", None, None, ())

    def ended(self, request_id: RequestId, reason: str) -> Outcome:
        accepted, step = self._under_way.pop(request_id)
        if reason != "deadline":
            raise StuckError(f"image {accepted.inspection_id} ended with {reason}")
        self.queued[self._image(accepted).chain[step]] -= 1
        self._course.wasted_steps += step
        self._course.expired += 1
        return Outcome(accepted.inspection_id, "unknown", None, reason, ())

    def _image(self, accepted: Accepted) -> Image:
        return self._task[accepted.inspection_id]

    def _next(self, accepted: Accepted, step: int) -> Request:
        self._last_request += 1
        request_id, image = RequestId(self._last_request), self._image(accepted)
        self._under_way[request_id] = (accepted, step)
        self.queued[image.chain[step]] += 1
        return Request(request_id, image.chain[step], self._time.now(), image.deadline_s, step)


class Simulation:
    """One task on one machine under one policy. `prefilled`: the initial fill is over before the first image comes."""

    def __init__(
        self,
        machine: SimulatedMachine,
        task: Task,
        policy: str,
        *,
        tuning: Tuning | None = None,
        prefilled: bool = True,
        keep_spans: bool = False,
    ) -> None:
        self._machine, self._images = machine, task.images
        self._prefilled, self._keep_spans = prefilled, keep_spans
        self._clock = clock = SimulatedClock()
        self.outcome = TaskOutcome(policy, len(task.images))
        self._chains = _TaskChains(task.images, clock, self.outcome)
        self._left = len(task.images)
        self._device = {facts.pool: facts.device for facts in machine.pools}
        self._costs = {(row.device, row.architecture): (row.k_s, row.b_s) for row in machine.matrix}
        self._channels: dict[TransferChannel, SimulatedChannel] = {}
        self._at_once = SimulatedChannel(clock)
        pools = {facts.pool: SimulatedPool(facts.budget_bytes) for facts in machine.pools}
        processors = {name: SimulatedProcessor(clock, value) for name, value in machine.concurrency.items()}
        self._drive = Drive(
            Makeup(task.experts, machine.pools, machine.executors, policy, tuning or Tuning(), machine.matrix),
            self._chains,
            {facts.expert: _spec_of(facts) for facts in task.experts},
            [
                SimulatedExecutor(
                    facts,
                    pools[facts.pool],
                    clock,
                    lambda _spec, _image: _ANSWER,
                    lambda spec, device=self._device[facts.pool]: self._costs[device, spec.architecture],
                    processors[self._device[facts.pool]],
                    lambda order, work_s, device=self._device[facts.pool]: self._begun(order, work_s, device),
                )
                for facts in machine.executors
            ],
            [SimulatedLoader(name, pool, self._route, pools, self._note_load) for name, pool in pools.items()],
            hang_after_s=_NEVER_S,
            clock=clock.now,
            wall=clock.now,
        )

    def run(self) -> TaskOutcome:
        """Play the whole task. Raises StuckError."""
        clock, arrivals = self._clock, deque(enumerate(self._images))
        self._drive.start_devices(self)
        until_s = self._fill() if self._prefilled else None
        while self._left:
            limits = [at_s for at_s in (until_s, arrivals[0][1].arrived_s if arrivals else None) if at_s is not None]
            if not clock.step(min(limits, default=None)):
                raise StuckError(f"{self._left} images wait for ever: {dict(+self._chains.queued)}")
            due: list[Accepted] = []
            while arrivals and arrivals[0][1].arrived_s <= clock.now():
                due.append(_accepted(*arrivals.popleft()))
            if due:
                self._drive.accept(due)
            until_s = self._drive.turn()
        return self.outcome

    def _fill(self) -> float | None:
        """Fill the pools without time passing; return when the drive wants to decide again."""
        until_s = self._drive.turn()
        while self._drive.is_filling and self._clock.next_s == self._clock.now():
            self._clock.step()
            until_s = self._drive.turn()
        return until_s

    # The drive's reports

    def finished(self, outcome: Outcome) -> None:  # noqa: ARG002  the chains have counted it
        self._left -= 1
        self.outcome.makespan_s = self._clock.now()

    def batch_done(self, batch: BatchDone) -> None:
        if self._keep_spans:
            lane, begun_s, ended_s = str(batch.executor), batch.started_wall_s, batch.ended_wall_s
            self.outcome.spans.append(Span(lane, "batch", ExpertId(batch.expert), batch.images, begun_s, ended_s))

    def switched(self, switch: ExpertSwitch) -> None: ...

    def sampled(self, sample: QueueSample) -> None: ...

    def bad_image(self, image: Accepted, reason: str) -> None: ...

    # The devices'

    def _begun(self, order: BatchOrder, work_s: float, device: str) -> None:
        self._chains.begun(order)
        self.outcome.busy_s[device] = self.outcome.busy_s.get(device, 0.0) + work_s

    def _note_load(self, load: Load) -> None:
        if load.cause != "startup":
            self.outcome.loads += load.pool != RAM
            self.outcome.disk_loads += load.source is None
        self.outcome.wanted_evictions += sum(self._chains.queued[victim] > 0 for victim in load.evict)

    def _note_transfer(self, channel: str, load: Load, begun_s: float) -> None:
        if self._keep_spans:
            self.outcome.spans.append(Span(channel, load.cause, load.expert, 0, begun_s, self._clock.now()))

    def _route(self, order: LoadOrder) -> Route:
        """Return the channels that a load passes, one after the other; none of them for a fill that is over."""
        load, device = order.load, self._device[order.load.pool]
        if self._prefilled and load.cause == "startup":
            return [(self._at_once, 0.0)]
        way = self._machine.from_disk[device] if load.source is None else self._machine.from_ram[device]
        return [(self._channel(channel), self._seconds(order, device, channel)) for channel in way]

    def _channel(self, channel: TransferChannel) -> SimulatedChannel:
        if channel not in self._channels:
            self._channels[channel] = SimulatedChannel(self._clock, channel.name, channel.fixed_s, self._note_transfer)
        return self._channels[channel]

    def _seconds(self, order: LoadOrder, device: str, channel: TransferChannel) -> float:
        if self._machine.load_s is None:
            return order.spec.weights_bytes / channel.bytes_per_s
        disk_s, ram_s = self._machine.load_s.get((device, order.spec.architecture), (0.0, 0.0))
        return disk_s if order.load.source is None else ram_s


def simulate(
    machine: SimulatedMachine, task: Task, policy: str, *, tuning: Tuning | None = None, prefilled: bool = True
) -> TaskOutcome:
    """Play `task` under `policy`. Raises StuckError."""
    return Simulation(machine, task, policy, tuning=tuning, prefilled=prefilled).run()


def _spec_of(facts: ExpertFacts) -> ExpertSpec:
    """Return an expert without weights, for the drive's catalog."""
    return ExpertSpec(
        expert=facts.expert,
        architecture=facts.architecture,
        task="classify",
        file=Path(),
        classes=(),
        input_size=0,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        sha256="",
        layout=LayoutId(facts.architecture),
        weights_bytes=facts.weights_bytes,
    )


def _accepted(number: int, image: Image) -> Accepted:
    return Accepted(number, "task", str(number), "", "", image.arrived_s, None, "", JournalKey(0, number, 0), Pixels())
