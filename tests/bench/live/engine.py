"""Sides that run on our own engine: the real drive, executor and loader threads and pools of slots, without sockets."""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from daemon.dispatch.channels import Channels
from daemon.dispatch.drive import Drive
from daemon.dispatch.pool import DevicePool
from daemon.dispatch.trace import Makeup
from daemon.policy.paper.assign import partition
from daemon.policy.predict import expert_facts
from daemon.policy.presets import Tuning, preset
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId, device_of
from daemon.records import BoardRef, ExpertSwitch, Image, JournalKey, Verdict
from experts.errors import ExpertError
from experts.spec import Answer, ExpertId, ExpertSpec, resident_in
from experts.vision.infer import infer_each
from experts.vision.preprocess import Prepared
from experts.vision.slot import SlotPool
from routing_rules.compile import compile_rules
from tests.bench.devices import bench_shelf
from tests.bench.live.expert_files import goes_on, read_experts, reader_of
from tests.bench.live.image_trace import BOARD_TYPE, LABELS
from tests.bench.live.loading import Forward, ModelPool, accept_file, loader_of
from tests.bench.live.sides import SIDES, SideInput, SideResult
from tests.bench.processes import peak_bytes
from tests.editions import a_serving

#: Limit of the initial fill, and of the threads' end.
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class _FinishedImage:
    verdict: Verdict
    at_s: float


class LiveEngine:
    """One side's drive with its executors and pools, and the reports of the drive: `verdicts`, `switches`."""

    def __init__(self, work: SideInput) -> None:
        self.verdicts: queue.SimpleQueue[_FinishedImage] = queue.SimpleQueue()
        self.switches: list[tuple[float, ExpertSwitch]] = []
        self._work = work
        self._routes = compile_rules(work.trace.rules(), "bench")
        self._specs = read_experts(work.catalog)
        side = SIDES[work.side]
        max_batch = side.max_batch or max(row.max_batch for row in work.costs)
        pool_facts, executor_facts = partition(
            [
                PoolFacts(PoolId(name), "cpu" if name == "cpu" else "gpu", budget_bytes, max_batch)
                for name, budget_bytes in zip(work.devices, work.budgets, strict=True)
            ],
            [
                ExecutorFacts(ExecutorId(f"{name}/{number}"), PoolId(name))
                for name in work.devices
                for number in range(work.executors)
            ],
            preset(side.scheduler),
        )
        memories, channels = self._memories(pool_facts), Channels()
        on_cpu = sum(device_of(each.pool) == "cpu" for each in executor_facts)
        threads = max(1, work.threads // max(1, on_cpu))
        facts = expert_facts(self._specs.values(), self._routes, {})
        costs = tuple(replace(row, max_batch=min(row.max_batch, max_batch)) for row in work.costs)
        if side.loading != "slots":  # other models are read from their files
            costs = tuple(replace(row, ram_s=None) for row in costs)
        serving = a_serving(self._routes, {ExpertId(spec.name): spec for spec in self._specs.values()})
        self.drive = Drive(
            Makeup(facts, pool_facts, executor_facts, side.scheduler, Tuning(), costs),
            serving,
            [
                DevicePool(
                    name,
                    [each.executor for each in executor_facts if each.pool == name],
                    memory,
                    _with_verdicts_of_the_trace(
                        infer_each if side.loading == "slots" else _of_one_expert(memory.forward)
                    ),
                    self._read,
                    channels=channels,
                    sources=memories,
                    enter=lambda: torch.set_num_threads(threads),
                )
                for name, memory in memories.items()
            ],
        )

    def finished(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            self.verdicts.put(_FinishedImage(verdict, time.monotonic()))

    def switched(self, switch: ExpertSwitch) -> None:
        self.switches.append((time.monotonic(), switch))

    def _ignore(self, *_: Any, **__: Any) -> None: ...

    judged = bad_image = batch_done = sampled = editions_ended = _ignore

    def start(self) -> None:
        """Start, and wait for the initial fill, where the policy has one."""
        self.drive.start(self)
        until_s = time.monotonic() + _PATIENCE_S
        while self.drive.is_filling and time.monotonic() < until_s:
            time.sleep(0.01)

    def accept(self, first: int, end: int, began_s: float) -> None:
        """Accept the trace's images from `first` up to, not including, `end`."""
        deadline_s, board = self._work.deadline_s, BoardRef(BOARD_TYPE, "")
        images = [
            Image(
                inspection_id=number + 1,
                source="bench",
                image_id=str(number),
                board=board,
                component=self._work.trace.images[number].classifier,
                designator=str(number),
                accepted_s=began_s + self._work.trace.images[number].arrives_s,
                deadline_ms=None if deadline_s is None else round(deadline_s * 1000),
                edition=1,
                key=JournalKey(1, number, 0),
            )
            for number in range(first, end)
        ]
        self.drive.accept(images)

    def _read(self, key: JournalKey) -> bytes:
        """Return a JPEG from memory in place of the journal; the key's offset is the image's number."""
        return self._work.payload(key.offset)

    def _memories(self, pools: Sequence[PoolFacts]) -> dict[PoolId, Any]:
        work, reader = self._work, reader_of(self._work.disk)
        if (loading := SIDES[work.side].loading) != "slots":
            return {
                facts.pool: ModelPool(
                    loader_of(loading, reader, facts.budget_bytes, work.threads_per_executor, facts.device),
                    facts.budget_bytes,
                )
                for facts in pools
            }
        shelf = bench_shelf(packs={facts.device for facts in pools} == {"cpu"})
        for spec in resident_in(self._specs).values():
            accept_file(shelf, spec, pools[0].device)
        return {facts.pool: SlotPool(facts.device, facts.budget_bytes, shelf, reader) for facts in pools}


def run_engine(work: SideInput) -> SideResult:
    """Inspect all images of the trace as they arrive; stop at the limit."""
    engine, images = LiveEngine(work), work.trace.images
    engine.start()
    began_s = time.monotonic()
    finished: list[_FinishedImage] = []
    accepted = 0
    while len(finished) < len(images) and (left_s := began_s + work.limit_s - time.monotonic()) > 0:
        due = accepted
        while due < len(images) and images[due].arrives_s <= time.monotonic() - began_s:
            due += 1
        if due > accepted:
            engine.accept(accepted, due, began_s)
            accepted = due
        next_s = left_s if accepted == len(images) else began_s + images[accepted].arrives_s - time.monotonic()
        try:
            finished.append(engine.verdicts.get(timeout=max(0.0, min(left_s, next_s))))
        except queue.Empty:
            continue
    stopped = len(finished) < len(images)
    ended_s = time.monotonic() if stopped else max(image.at_s for image in finished)
    loads = [switch for at_s, switch in list(engine.switches) if at_s >= began_s and switch.cause != "startup"]
    executors = engine.drive.ask("status", {})["executors"]
    engine.drive.stop(_PATIENCE_S)
    # Other devices take over the work of a lost one, and the rate is then theirs: the result must say so.
    lost = [
        f"{each['name']} is out of service: {each['out_of_service']}"
        for each in executors
        if each.get("out_of_service")
    ]
    result = _result(work, finished, loads, began_s, ended_s)
    return replace(result, failure="; ".join(lost)) if lost else result


def _result(
    work: SideInput, finished: list[_FinishedImage], loads: list[ExpertSwitch], began_s: float, ended_s: float
) -> SideResult:
    verdicts = [one.verdict for one in finished]
    failures = [verdict.reason for verdict in verdicts if verdict.reason not in (None, "deadline")]
    return SideResult(
        side=work.side,
        images=len(finished),
        seconds=ended_s - began_s,
        stopped=len(finished) < len(work.trace.images),
        loads=len(loads),
        waits_s=tuple(verdict.stages[0].queued_ms / 1e3 for verdict in verdicts if verdict.stages),
        latencies_s=tuple(
            one.at_s - began_s - work.trace.images[one.verdict.image.inspection_id - 1].arrives_s for one in finished
        ),
        unknown=sum(verdict.verdict == "unknown" for verdict in verdicts),
        failure=f"{len(failures)} images failed: {failures[0]}" if failures else "",
        peak_bytes=peak_bytes(),
    )


ForwardEach = Callable[[Any, Sequence[Prepared], Sequence[ExpertSpec]], Sequence[Answer | ExpertError]]


def _of_one_expert(forward: Forward) -> ForwardEach:
    return lambda slot, prepared, _experts: forward(slot, prepared)


def _with_verdicts_of_the_trace(forward: ForwardEach) -> ForwardEach:
    """The network computes; the label of a classifier's image is then the one that the image carries."""

    def run(slot: Any, prepared: Sequence[Prepared], experts: Sequence[ExpertSpec]) -> Sequence[Answer | ExpertError]:
        answers = forward(slot, prepared, experts)
        if slot.spec.task == "detect":
            return [Answer(None, None) for _ in answers]
        return [
            answer
            if isinstance(answer, ExpertError)
            else replace(answer, label=LABELS[0] if goes_on(image.width) else LABELS[1])
            for answer, image in zip(answers, prepared, strict=True)
        ]

    return run
