"""Simulated time: the daemon's own drive and scheduler on simulated channels and processors. Exact, repeatable."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from daemon.dispatch.chains import Judged
from daemon.dispatch.drive import Drive
from daemon.dispatch.pool import Batch
from daemon.dispatch.simulated import (
    Route,
    SimulatedChannel,
    SimulatedClock,
    SimulatedMemory,
    SimulatedNetwork,
    SimulatedPool,
    SimulatedProcessor,
)
from daemon.dispatch.trace import Makeup
from daemon.line.served import Served
from daemon.line.serving import Serving
from daemon.policy.actions import Load
from daemon.policy.presets import Tuning
from daemon.policy.request import RAM, ExpertFacts
from daemon.records import BatchDone, BoardRef, ExpertSwitch, Image, JournalKey, QueueSample, Verdict
from experts.catalog import Catalog
from experts.editions.edition import Edition
from experts.spec import Answer, ExpertId, ExpertSpec, LayoutId
from routing_rules.routes import DetectorStep, Routes, Step
from tools.simulate.world import SimulatedMachine, Task, TaskImage, TransferChannel

#: Nothing hangs here.
_NEVER_S = 1e12
_ANSWER = Answer(None, None)
_BOARD = BoardRef("task", "")


@dataclass(frozen=True, slots=True)
class Span:
    """A load on a channel or a batch on an executor, for the timeline; seconds."""

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
    #: Weights and images that crossed the network to other PCs, the initial fill not counted.
    network_bytes: int = 0
    network_loads: int = 0
    answered: int = 0
    expired: int = 0
    late: int = 0
    waits_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


class StuckError(RuntimeError):
    """Images wait and nothing will ever happen: a defect of the policy."""


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
        #: The component of each chain of experts: the rules of the task know no other.
        self._components = {image.chain: str(number) for number, image in enumerate(task.images)}
        self._left = len(task.images)
        self._under_way: dict[int, float] = {}
        #: Requests by expert that have not begun, and how many experts each image has been queued for.
        self._queued: Counter[ExpertId] = Counter()
        self._asked: Counter[int] = Counter()
        self._facts = {facts.pool: facts for facts in machine.pools}
        self._costs = {(row.device, row.architecture): (row.k_s, row.b_s) for row in machine.matrix}
        self._channels: dict[TransferChannel, SimulatedChannel] = {}
        self._at_once = SimulatedChannel(clock)
        #: Experts that have crossed the network, each with the PC whose own disk keeps it from then on.
        self._crossed: set[tuple[str, ExpertId]] = set()
        self._network = network = machine.network and SimulatedNetwork(
            clock, machine.network.bytes_per_s, machine.network.latency_ms / 1000.0, self._note_transfer
        )
        memories = {facts.pool: SimulatedMemory(facts.budget_bytes) for facts in machine.pools}
        processors = {name: SimulatedProcessor(clock, value) for name, value in machine.concurrency.items()}
        self._drive = Drive(
            Makeup(task.experts, machine.pools, machine.executors, policy, tuning or Tuning(), machine.matrix),
            Serving(_served(task, self._components)),
            [
                SimulatedPool(
                    facts.pool,
                    memories[facts.pool],
                    clock,
                    self._route,
                    lambda _spec, _image: _ANSWER,
                    sources=memories,
                    costs=lambda spec, device=facts.device: self._costs[device, spec.architecture],
                    processor=processors.get(facts.device),
                    on_load=self._note_load,
                    on_batch=self._begun,
                    **({"carry": self._carry} if network and facts.host else {}),
                )
                for facts in machine.pools
            ],
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
                raise StuckError(f"{self._left} images wait for ever: {dict(+self._queued)}")
            due: list[Image] = []
            while arrivals and arrivals[0][1].arrived_s <= clock.now():
                due.append(self._accepted(*arrivals.popleft()))
            if due:
                self._drive.accept(due)
            # Most steps of a network leave nothing to decide. Without one, published figures need a turn at each step.
            if not self._network or self._drive.has_events or (until_s is not None and until_s <= clock.now()):
                until_s = self._drive.turn()
        self.outcome.network_bytes = self._network.sent_bytes if self._network else 0
        return self.outcome

    def _fill(self) -> float | None:
        """Fill the pools without time passing; return when the drive wants to decide again."""
        until_s = self._drive.turn()
        while self._drive.is_filling and self._clock.next_s == self._clock.now():
            self._clock.step()
            until_s = self._drive.turn()
        return until_s

    def _accepted(self, number: int, image: TaskImage) -> Image:
        self._queue(number, image.chain[0])
        deadline_ms = None if image.deadline_s is None else round((image.deadline_s - image.arrived_s) * 1000)
        self._under_way[number] = self._clock.now()
        return Image(
            inspection_id=number,
            source="task",
            image_id=str(number),
            board=_BOARD,
            component=self._components[image.chain],
            designator=str(number),
            deadline_ms=deadline_ms,
            edition=1,
            key=JournalKey(0, number, 0),
            accepted_s=image.arrived_s,
        )

    def _queue(self, number: int, expert: str) -> None:
        self._queued[ExpertId(expert)] += 1
        self._asked[number] += 1

    # The drive's reports

    def judged(self, answers: list[Judged]) -> None:
        for image, _, _, _, judged in answers:
            if judged.next is not None:
                self._queue(image.inspection_id, judged.next.expert)

    def finished(self, verdicts: list[Verdict]) -> None:
        course, now = self.outcome, self._clock.now()
        course.makespan_s = now
        for verdict in verdicts:
            number, stages = verdict.image.inspection_id, len(verdict.stages)
            chain, accepted_s, asked = self._images[number].chain, self._under_way.pop(number), self._asked.pop(number)
            self._left -= 1
            if verdict.reason not in (None, "deadline"):
                raise StuckError(f"image {number} ended with {verdict.reason}")
            if stages == len(chain):
                course.answered += 1
                course.latencies_s.append(now - accepted_s)
                course.late += verdict.reason is not None
            else:
                course.expired += 1
                self._queued[chain[stages]] -= asked > stages

    def batch_done(self, batch: BatchDone) -> None:
        if self._keep_spans:
            lane, begun_s, ended_s = str(batch.executor), batch.started_wall_s, batch.ended_wall_s
            self.outcome.spans.append(Span(lane, "batch", ExpertId(batch.expert), batch.images, begun_s, ended_s))

    def switched(self, switch: ExpertSwitch) -> None: ...

    def sampled(self, sample: QueueSample) -> None: ...

    def editions_ended(self, numbers: list[int]) -> None: ...

    def bad_image(self, image: Image, reason: str) -> None: ...

    # The devices'

    def _begun(self, batch: Batch, _work_s: float) -> None:
        self._queued[batch.spec.expert] -= len(batch.images)
        for image, request in zip(batch.images, batch.requests, strict=True):
            if request.step == 0:
                self.outcome.waits_s.append(self._clock.now() - self._under_way[image.key.offset])

    def _note_load(self, load: Load) -> None:
        if load.cause != "startup":
            self.outcome.loads += self._facts[load.pool].processor != "ram"
            self.outcome.disk_loads += load.source is None
        self.outcome.wanted_evictions += sum(self._queued[victim] > 0 for victim in load.evict)

    def _note_transfer(self, channel: str, load: Load, begun_s: float) -> None:
        if self._keep_spans:
            self.outcome.spans.append(Span(channel, load.cause, load.expert, 0, begun_s, self._clock.now()))

    def _route(self, load: Load, spec: ExpertSpec) -> Route:
        """Return the channels that a load passes, in order; none for a fill that is over."""
        machine, device, host = self._machine, self._facts[load.pool].device, self._facts[load.pool].host
        was_there = not host or load.source is not None or (host, load.expert) in self._crossed
        if load.source is None:
            self._crossed.add((host, load.expert))
        if self._prefilled and load.cause == "startup":
            return [(self._at_once, 0.0)]
        way = machine.from_disk[device] if load.source is None else machine.from_ram[device]
        if was_there or not self._network or not machine.network:
            return [self._leg(load, spec, channel) for channel in way]
        # From the line's disk; behind it, the route is that of the worker's own disk.
        self.outcome.network_loads += 1
        over_s = spec.weights_bytes / machine.network.bytes_per_s
        first, *rest = (self._leg(load, spec, channel) for channel in (machine.from_disk[RAM][0], *way[1:]))
        return [first, (self._network, over_s), *rest]

    def _carry(self, images: int, done: Callable[[], None]) -> None:
        if self._network and self._machine.network:
            self._network.send(images * self._machine.network.image_bytes, done)

    def _leg(self, load: Load, spec: ExpertSpec, channel: TransferChannel) -> tuple[SimulatedChannel, float]:
        """Return a channel and the seconds for which it carries a load."""
        if channel not in self._channels:
            self._channels[channel] = SimulatedChannel(self._clock, channel.name, channel.fixed_s, self._note_transfer)
        seconds = spec.weights_bytes / channel.bytes_per_s
        if self._machine.load_s is not None:
            device = self._facts[load.pool].device
            disk_s, ram_s = self._machine.load_s.get((device, spec.architecture), (0.0, 0.0))
            seconds = disk_s if load.source is None else ram_s
        return self._channels[channel], seconds


def _served(task: Task, components: Mapping[tuple[ExpertId, ...], str]) -> Served:
    """Return an edition of the task's experts whose rules lead each image along its chain, whatever is answered."""
    steps: dict[str, Step] = {}
    for chain, component in components.items():
        step: Step | None = None
        for expert in reversed(chain):
            step = DetectorStep(expert, expert, otherwise=step)
        if step is not None:
            steps[component] = step
    edition = Edition(number=1, created_at=datetime.fromtimestamp(0, UTC), who="", why="reload", rules="", experts={})
    routes = Routes("", "", {}, {_BOARD.type: steps}, (), None, (), {}, {})
    return Served(edition, routes, Catalog({facts.expert: _spec_of(facts) for facts in task.experts}, {}))


def _spec_of(facts: ExpertFacts) -> ExpertSpec:
    return ExpertSpec(
        expert=facts.expert,
        architecture=facts.architecture,
        task="classify",
        file=Path(),
        classes=("ok",),
        input_size=0,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        sha256="",
        layout=LayoutId(facts.architecture),
        weights_bytes=facts.weights_bytes,
    )
