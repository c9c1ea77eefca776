"""Sides that run on our own engine: the real drive, executor and loader threads, slot pools, no sockets."""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from daemon.dispatch.channels import Channels
from daemon.dispatch.drive import Drive
from daemon.dispatch.executors import ExecutorThread
from daemon.dispatch.flow import Chains
from daemon.dispatch.loader import PoolLoader
from daemon.dispatch.trace import Makeup
from daemon.line.rulebook import Rulebook
from daemon.policy.paper.assign import partition
from daemon.policy.predict import expert_facts
from daemon.policy.presets import Tuning, preset
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId
from daemon.records import Accepted, ExpertSwitch, Outcome, Pixels
from daemon.storage.journal import Journal
from experts.reading import Reader
from experts.slot import LayoutShelf, Slot, SlotPool, file_identity
from experts.spec import Answer, ExpertId, ExpertSpec
from experts.vision.infer import infer
from experts.vision.preprocess import Prepared
from routing_rules.compile import compile_rules
from routing_rules.routes import Routes
from tests.bench.disks import reader_of
from tests.bench.job import ORDINARY, Job, Run
from tests.bench.ordinary import ModulePool, OrdinaryFiles, OrdinaryModel, answer
from tests.bench.pictures import goes_on
from tests.bench.stock import read_stock
from tests.bench.workload import BOARD_TYPE, LABELS, Ask

_CPU = PoolId("cpu")
#: How long the initial fill may take, and the threads' end.
_PATIENCE_S = 300.0

Forward = Callable[[Slot, Sequence[Prepared]], Sequence[Answer]]


@dataclass(frozen=True, slots=True)
class _Ended:
    outcome: Outcome
    at_s: float


class Engine:
    """One side's drive and what it drives."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.outcomes: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self.switches: list[tuple[float, ExpertSwitch]] = []
        self.routes: Routes = compile_rules(job.trace.rules(), "bench")
        specs = read_stock(job.catalog)
        policy = "samba" if job.side == ORDINARY else job.side
        pools, executors = partition(
            [PoolFacts(_CPU, "cpu", job.memory_bytes, job.max_batch)],
            [ExecutorFacts(ExecutorId(f"cpu/{number}"), _CPU) for number in range(job.executors)],
            preset(policy),
        )
        journal, reader, channels = Journal(job.journal), reader_of(job.disk), Channels()
        made: dict[PoolId, Any] = (
            _module_pools(pools, reader) if job.side == ORDINARY else _slot_pools(pools, reader, specs)
        )
        forward = _with_the_traces_verdict(_ordinary if job.side == ORDINARY else infer)
        threads = max(1, job.threads // len(executors))
        facts = expert_facts(specs.values(), self.routes, {})
        self.drive = Drive(
            Makeup(facts, pools, executors, policy, Tuning(), tuple(job.matrix)),
            Chains(Rulebook(self.routes).get, time.monotonic, time.time),
            specs,
            [
                ExecutorThread(
                    each, made[each.pool].slot, journal.read, forward, enter=lambda: torch.set_num_threads(threads)
                )
                for each in executors
            ],
            [PoolLoader(name, pool, channels) for name, pool in made.items()],
            record=job.record,
        )

    def finished(self, outcome: Outcome) -> None:
        self.outcomes.put(_Ended(outcome, time.monotonic()))

    def switched(self, switch: ExpertSwitch) -> None:
        self.switches.append((time.monotonic(), switch))

    def ignore(self, *_: object) -> None: ...

    bad_image = batch_done = sampled = ignore

    def fill(self) -> None:
        """Start, and wait for the initial fill, where the policy has one."""
        self.drive.start(cast("Any", self))
        until_s = time.monotonic() + _PATIENCE_S
        while self.drive.is_filling and time.monotonic() < until_s:
            time.sleep(0.01)

    def warm(self) -> None:
        """Inspect one image of each part that is in the trace, all the way."""
        asks = self.job.trace.asks
        first = {ask.classifier: Ask(ask.classifier, ask.detector, ask.picture, goes_on=True) for ask in asks}
        wall_s = time.time()
        self.drive.accept([self.image(len(asks) + n, ask, wall_s) for n, ask in enumerate(first.values())])
        for _ in first:
            self.outcomes.get(timeout=_PATIENCE_S)

    def image(self, number: int, ask: Ask, wall_s: float) -> Accepted:
        """An image of the trace as it is accepted at `wall_s`."""
        deadline_ms = None if self.job.deadline_s is None else round(self.job.deadline_s * 1000)
        return Accepted(
            inspection_id=number + 1,
            source="bench",
            image_id=str(number),
            board_type=BOARD_TYPE,
            component=ask.classifier,
            accepted_wall_s=wall_s,
            deadline_ms=deadline_ms,
            rules_version=self.routes.version,
            key=self.job.key(ask.picture, goes_on=ask.goes_on),
            pixels=Pixels(),
        )


def run_engine(job: Job) -> Run:
    """All images of the trace as they arrive; stopped at the limit."""
    engine = Engine(job)
    engine.fill()
    if job.warm:
        engine.warm()
    asks = job.trace.asks
    began_s, began_wall_s = time.monotonic(), time.time()
    ended: list[_Ended] = []
    sent = 0
    while len(ended) < len(asks) and (left_s := began_s + job.limit_s - time.monotonic()) > 0:
        due = sent
        while due < len(asks) and asks[due].at_s <= time.monotonic() - began_s:
            due += 1
        if due > sent:
            engine.drive.accept([engine.image(n, asks[n], began_wall_s + asks[n].at_s) for n in range(sent, due)])
            sent = due
        next_s = left_s if sent == len(asks) else began_s + asks[sent].at_s - time.monotonic()
        try:
            ended.append(engine.outcomes.get(timeout=max(0.0, min(left_s, next_s))))
        except queue.Empty:
            continue
    stopped_s = time.monotonic()
    switches = [switch for at_s, switch in engine.switches if began_s <= at_s <= stopped_s]
    stopped = len(ended) < len(asks)
    engine.drive.stop(_PATIENCE_S)
    return _account(job, ended, switches, began_s, stopped_s if stopped else max(one.at_s for one in ended))


def _account(
    job: Job, ended: Sequence[_Ended], switches: Sequence[ExpertSwitch], began_s: float, ended_s: float
) -> Run:
    asks = job.trace.asks
    loads = [switch for switch in switches if switch.cause != "startup"]
    return Run(
        side=job.side,
        images=len(ended),
        seconds=ended_s - began_s,
        stopped=len(ended) < len(asks),
        loads=len(loads),
        loaded_bytes=sum(switch.bytes for switch in loads),
        waits_s=tuple(one.outcome.stages[0].queued_ms / 1e3 for one in ended if one.outcome.stages),
        latencies_s=tuple(one.at_s - began_s - asks[one.outcome.inspection_id - 1].at_s for one in ended),
        unknown=sum(one.outcome.verdict == "unknown" for one in ended),
        late=sum(one.outcome.reason == "deadline" for one in ended),
        note=_faults([one.outcome.reason for one in ended]),
    )


def _faults(reasons: Sequence[str | None]) -> str:
    broken = [reason for reason in reasons if reason not in (None, "deadline")]
    return f"{len(broken)} images failed: {broken[0]}" if broken else ""


def _slot_pools(
    pools: Sequence[PoolFacts], reader: Reader, specs: dict[ExpertId, ExpertSpec]
) -> dict[PoolId, SlotPool]:
    shelf = LayoutShelf()
    for spec in specs.values():
        # As in a line that has run for a while: layouts are built, and files were checked when first loaded.
        shelf.get(spec)
        shelf.verified[spec.file] = file_identity(spec.file.stat(), spec)
    return {facts.pool: SlotPool(facts.device, facts.budget_bytes, shelf, reader) for facts in pools}


def _module_pools(pools: Sequence[PoolFacts], reader: Reader) -> dict[PoolId, Any]:
    files = OrdinaryFiles(reader)
    return {facts.pool: ModulePool(files, facts.budget_bytes) for facts in pools}


def _ordinary(slot: Slot, prepared: Sequence[Prepared]) -> Sequence[Answer]:
    found = cast("OrdinaryModel", slot)
    return answer(found.module, found.spec, prepared)


def _with_the_traces_verdict(forward: Forward) -> Forward:
    """The network computes; what it says of a classifier's image is then the trace's word (pictures.py)."""

    def run(slot: Slot, prepared: Sequence[Prepared]) -> list[Answer]:
        answers = forward(slot, prepared)
        if slot.spec.task == "detect":
            return [Answer(None, None) for _ in answers]
        return [
            replace(found, label=LABELS[0] if goes_on(image.placement.width) else LABELS[1])
            for found, image in zip(answers, prepared, strict=True)
        ]

    return run
