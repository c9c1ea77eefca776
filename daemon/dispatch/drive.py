"""The drive thread: the only one that uses the scheduler. It takes events, carries out actions and reports verdicts.

All events arrive in one queue. After each turn loads go to the loaders, batches to the executors.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import structlog

from daemon.dispatch.chains import MAX_LOSSES, Chains, Judged
from daemon.dispatch.pool import Batch, LoadEnd, Pool
from daemon.dispatch.scheduler_control import SchedulerControl, executor_rows, memory_rows, pool_rows, queue_lengths
from daemon.dispatch.trace import Makeup, RecordingScheduler
from daemon.dispatch.watch import ExecutorHealth, RunningWork
from daemon.line.served import Served
from daemon.line.serving import Serving
from daemon.policy.actions import Run, Wait
from daemon.policy.operate import OperationRefusedError
from daemon.policy.predict import expert_facts
from daemon.policy.request import ExpertFacts, PoolId, device_of
from daemon.records import BatchDone, ExpertSwitch, Image, QueueSample, Stage, Verdict
from daemon.wire.control import ControlError
from experts.spec import Answer, ExpertId, name_of, resident_in
from routing_rules.routes import GUARDS

#: Pause after a turn that failed through a defect of ours, so that the thread cannot busy-loop.
_AFTER_DEFECT_S = 0.5
#: Shortest time between two samples of the queues. An idle line takes no samples: nothing changes.
_SAMPLE_EVERY_S = 1.0

#: Events handled in one turn. A larger number would leave executors idle for longer.
_EVENTS_PER_TURN = 256
_ANSWER_WITHIN_S = 10.0

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class DriveCall(Generic[R]):
    do: Callable[[], R]
    answer: Future[R]


#: None: stop.
Event = tuple[Image, ...] | Batch | LoadEnd | DriveCall[Any] | None


class Events:
    """The queue of events, filled by any thread."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.are_none = self._waiting.empty

    def post_event(self, event: Event) -> None:
        self._waiting.put(event)

    def take_turn(self, timeout_s: float | None) -> Iterator[Event]:
        """Yield the events of one turn, waiting up to `timeout_s` for the first (None: without limit)."""
        try:
            yield self._waiting.get(timeout=timeout_s) if timeout_s != 0.0 else self._waiting.get_nowait()
            for _ in range(_EVENTS_PER_TURN):
                yield self._waiting.get_nowait()
        except queue.Empty:
            pass

    def refuse_the_rest(self) -> None:
        while True:
            try:
                event = self._waiting.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, DriveCall):
                event.answer.set_exception(ControlError("stopping", "the line is stopping"))


class DriveReports(Protocol):
    """Called on the drive's thread; none may block. A turn's answers and verdicts come together."""

    def judged(self, answers: list[Judged]) -> None: ...
    def finished(self, verdicts: list[Verdict]) -> None: ...
    def bad_image(self, image: Image, reason: str) -> None: ...
    def batch_done(self, batch: BatchDone) -> None: ...
    def switched(self, switch: ExpertSwitch) -> None: ...
    def sampled(self, sample: QueueSample) -> None: ...
    def editions_ended(self, numbers: list[int]) -> None: ...


class Drive:
    """Runs the scheduler over the pools of devices; `start` takes the receiver of its reports.

    `makeup` describes the scheduler; its pools and executors are divided as the policy needs them (`partition`).
    `serving` are the editions, `usage` the usage probabilities of their experts as counted in a profile. `record` is
    the file for a trace (trace.py). A batch or load that takes longer than `hang_after_s`, and far longer than
    predicted, counts as hung: nothing else waits for it. `guards` are those that are on. Batch numbers start above
    `last_batch_id`, since the database's views tell batches apart by number. `clock` is monotonic seconds, `wall`
    seconds since the epoch.
    """

    _reports: DriveReports

    def __init__(  # noqa: PLR0913  app.py names each part it wires
        self,
        makeup: Makeup,
        serving: Serving,
        pools: Iterable[Pool],
        *,
        usage: Mapping[str, float] | None = None,
        record: Path | None = None,
        last_batch_id: int = 0,
        hang_after_s: float = 30.0,
        guards: Collection[str] = GUARDS,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._sample_at_s = 0.0
        self._clock, self._wall = clock, wall
        self._log: Any = structlog.get_logger("drive")
        self._usage = dict(usage or {})
        self._makeup = makeup
        self._serving = serving
        self._scheduler = RecordingScheduler(makeup, record) if record else makeup.scheduler()
        self._events = Events()
        by_name = {pool.pool: pool for pool in pools}
        self._work = RunningWork(
            {facts.pool: by_name[facts.pool] for facts in makeup.pools},
            makeup.executors,
            hang_after_s,
            clock,
            self._events.post_event,
        )
        self._chains = Chains(
            self._scheduler,
            serving,
            hang_after_s=hang_after_s,
            clock=clock,
            guards=guards,
        )
        self._health = ExecutorHealth(makeup.executors, self._scheduler)
        self._control = SchedulerControl(
            self._scheduler, self._chains, self._health, lambda: {**serving.current.routes.usage, **self._usage}
        )
        self._thread = threading.Thread(target=self._loop, name="drive", daemon=True)
        self._remote_pools = {facts.pool for facts in makeup.pools if facts.is_remote}
        #: Loads that no batch has used yet, and when they ended: the first batch records them.
        self._fresh_loads: dict[tuple[PoolId, ExpertId], tuple[float, float]] = {}
        self._last_batch_id = last_batch_id
        self._switches = 0
        self._stopping = False
        self._filling = set(self._work.pools)
        self._failing = False
        #: The newest answer to `ask("status")`, for other threads; empty before the first.
        self.last_status: dict[str, Any] = {}

    # From any thread

    def start(self, reports: DriveReports) -> None:
        self.start_devices(reports)
        self._thread.start()

    def start_devices(self, reports: DriveReports) -> None:
        self._reports = reports
        self._work.start()

    def accept(self, images: Sequence[Image]) -> None:
        self._events.post_event(tuple(images))

    def ask(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request of the control socket. Raises ControlError."""
        return self._wait_for(self.ask_later(kind, fields))

    def ask_later(self, kind: str, fields: Mapping[str, Any]) -> Future[dict[str, Any]]:
        return self._call(lambda: self._answer(kind, fields))

    def take_editions(self, newest: Served) -> None:
        """Schedule the experts of all editions that serve, with usage as `newest` has it.

        Call this before an edition comes into force: its images need its experts.
        """
        self._wait_for(self.take_editions_later(newest))

    def take_editions_later(self, newest: Served) -> Future[None]:
        return self._call(lambda: self._take_editions(newest))

    def misfits(self, served: Served) -> list[str]:
        """Return the experts of an edition that fit no device beside what other experts have pinned now."""
        facts = expert_facts(served.catalog.values(), served.routes)
        return self._wait_for(self._call(lambda: self._scheduler.misfits(facts)))

    def end_editions(self, numbers: list[int]) -> None:
        """End replaced editions at once; what waits for them is `unknown`, `edition_gone`."""
        self._wait_for(self._call(lambda: self._end_editions(numbers)))

    def device_lost(self, device: str, reason: str, *, was_there: bool = True) -> None:
        """Note that a device of another PC is gone or not there yet; its batches were reported before."""

        def note() -> None:
            self._health.device_lost(device, reason, was_there=was_there)
            self._chains.last_error = f"device {device}: {reason}"
            self._note_failures()

        self._call(note)

    def device_back(self, device: str, resume: Callable[[], None]) -> None:
        """Use a device of another PC, its memory empty; `resume` is called before any order to it."""

        def note() -> None:
            self._health.device_back(device)
            resume()
            self._note_failures()

        self._call(note)

    def _call(self, do: Callable[[], R]) -> Future[R]:
        answer: Future[R] = Future()
        self._events.post_event(DriveCall(do, answer))
        return answer

    def _wait_for(self, answer: Future[R]) -> R:
        if self._thread.ident is not None and not self._thread.is_alive():
            self._events.refuse_the_rest()
        try:
            return answer.result(_ANSWER_WITHIN_S)
        except FutureTimeoutError:
            raise ControlError("internal", f"the scheduler gave no answer within {_ANSWER_WITHIN_S:g} s") from None

    def stop(self, timeout_s: float) -> bool:
        """Report running work and end; False if that took too long. Waiting images stay in the journal."""
        deadline_s = self._clock() + timeout_s
        self._events.post_event(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        stopped = self._work.stop(deadline_s) and not self._thread.is_alive()
        if isinstance(self._scheduler, RecordingScheduler) and not self._thread.is_alive():
            self._scheduler.close()
        return stopped

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_filling(self) -> bool:
        """True during the pools' initial fill, until the first verdict."""
        return bool(self._filling) and self._chains.completed == 0

    @property
    def has_events(self) -> bool:
        return not self._events.are_none()

    @property
    def images_under_way(self) -> int:
        return self._chains.under_way

    @property
    def is_failing(self) -> bool:
        """True while something hangs or is out of service, an expert cannot be loaded, or images cannot be read."""
        return self._failing or self._chains.parked > 0

    @property
    def last_error(self) -> tuple[str | None, float]:
        return self._chains.last_error, self._chains.last_error_at_s

    # The drive thread

    def turn(self, timeout_s: float | None = 0.0) -> float | None:
        """Handle events and carry out decisions; return when to turn again without an event (drive clock)."""
        for event in self._events.take_turn(timeout_s):
            self._handle(event)
        if self._stopping:
            self._report()
            return None
        return self._decide()

    def _report(self) -> None:
        chains = self._chains
        judged, bad_images, verdicts = chains.judged, chains.bad_images, chains.verdicts
        chains.judged, chains.bad_images, chains.verdicts = [], [], []
        if judged:
            self._reports.judged(judged)
        for image, reason in bad_images:  # before its verdict, after which the journal may delete its bytes
            self._reports.bad_image(image, reason)
        if verdicts:
            self._reports.finished(verdicts)

    def _loop(self) -> None:
        until_s: float | None = self._clock()
        while not (self._stopping and not self._work.running):
            timeout_s = None if until_s is None else max(0.0, until_s - self._clock())
            try:
                until_s = self.turn(timeout_s)
            except Exception as error:  # noqa: BLE001  a defect of ours must not end the line
                self._log.exception("drive_defect")
                self._chains.last_error = f"{type(error).__name__}: {error}"
                until_s = self._clock() + _AFTER_DEFECT_S
                time.sleep(_AFTER_DEFECT_S)
        self._events.refuse_the_rest()

    def _handle(self, event: Event) -> None:
        match event:
            case Batch():
                self._batch_ended(event)
            case LoadEnd():
                self._load_ended(event)
            case DriveCall():
                try:
                    event.answer.set_result(event.do())
                except Exception as error:  # noqa: BLE001  the caller gets it
                    event.answer.set_exception(error)
            case None:
                self._stopping = self._chains.is_stopping = True
            case images if not self._stopping:
                self._chains.admit(images)
            case _:
                pass

    def _decide(self) -> float | None:
        now = self._clock()
        if due := self._serving.due(now):
            self._end_editions(due)
        self._check_for_hangs(now)
        wakes = [self._serving.next_end_s(), self._chains.retry_and_expire(now), self._health.next_try_s(now)]
        self._report()
        for pool in self._scheduler.pools_to_ask(self._work.pools, now):
            while not isinstance(change := self._scheduler.next_load(pool, now), Wait):
                self._work.change(change, self._chains.resident)
            wakes.append(change.until_s)
            if not self._work.is_loading(pool):
                self._filling.discard(pool)  # a loader fills its pool only while nothing else is wanted
        wakes.append(self._scheduler.next_turn_s)
        for name in self._work.idle():
            if self._health.rests(name, now):
                continue
            action = self._scheduler.next_action(name, now)
            if isinstance(action, Run):
                self._run(action, now)
            else:
                wakes.append(action.until_s)
        wakes.append(self._work.next_check_s(now))
        self._sample(now)
        return min((until_s for until_s in wakes if until_s is not None), default=None)

    def _sample(self, now: float) -> None:
        if now < self._sample_at_s:
            return
        self._sample_at_s = now + _SAMPLE_EVERY_S
        seen = self._scheduler.snapshot()
        queued, unloaded = queue_lengths(seen)
        waiting = sum(seen.queued.values())
        busy = {str(name): round(share, 4) for name, share in self._work.busy_shares().items()}
        self._reports.sampled(QueueSample(self._wall(), self._chains.under_way, waiting, unloaded, queued, busy))

    def _run(self, run: Run, now: float) -> None:
        self._last_batch_id += 1
        chains = [self._chains.chain_of(request) for request in run.batch]
        batch = Batch(
            number=self._last_batch_id,
            executor=run.executor,
            spec=self._chains.resident[run.expert],
            images=[chain.image for chain in chains],
            heads=[chain.head for chain in chains],
            requests=run.batch,
            load_ms=self._load_ms(run),
            began_s=now,
        )
        self._work.begin(batch, self._scheduler.predicted_s(run.executor, run.expert, len(chains)))

    def _load_ms(self, run: Run) -> float:
        """Return how long a batch waited for the load of its expert, if it is the first that uses it."""
        fresh = self._fresh_loads.pop((self._work.pool_of(run.executor), run.expert), None)
        if fresh is None:
            return 0.0
        load_ms, ended_s = fresh
        since_s = min(request.arrived_s for request in run.batch)
        return min(load_ms, max(0.0, ended_s - since_s) * 1000.0)

    def _load_ended(self, end: LoadEnd) -> None:
        load, now = end.load, self._clock()
        if self._work.load_ended(end):
            self._log.warning(
                "hung_load_ended", expert=name_of(load.expert), device=load.pool, error=end.error or "none"
            )
            self._scheduler.hung_load_ended(load)
            self._chains.release(load.expert)
            self._note_failures()
            return
        if end.error is not None:
            self._chains.last_error = end.error
            for request in self._scheduler.load_failed(load, end.error, now, end.is_device_error):
                self._chains.end(request, "expert_failed")
            if end.is_device_error:
                self._health.load_failed(load.pool, end.error, now)
            self._note_failures()
            return
        self._scheduler.load_done(load, end.load_ms / 1000.0)
        if self._failing:
            self._note_failures()
            self._chains.release(load.expert)  # it may have been loaded into another pool than the one whose load hangs
        self._fresh_loads[load.pool, load.expert] = end.load_ms, now
        self._switches += load.cause != "startup"
        self._reports.switched(_switch_of(end, self._wall()))

    def _batch_ended(self, batch: Batch) -> None:
        self._work.ended(batch)
        pool, expert = self._work.pool_of(batch.executor), batch.spec.expert
        if batch.is_abandoned:
            self._log.warning("hung_batch_ended", executor=batch.executor, expert=name_of(expert))
            self._scheduler.hung_batch_ended(pool, expert)
            self._note_failures()
            return
        if batch.memory_limit is not None:
            self._scheduler.limit_batch(batch.executor, expert, batch.memory_limit)
        # Before any next step is queued: until then the scheduler counts this batch as still sending images on.
        if batch.has_answers:
            self._scheduler.batch_done(batch.executor, batch.ended_s - batch.started_s)
        else:
            self._scheduler.batch_failed(batch.executor)
        self._note_health(batch)
        self._reports.batch_done(_record_of(batch, device_of(pool), self._wall() - self._clock()))
        is_device_error = batch.device_error is not None
        for number, (request, answer) in enumerate(zip(batch.requests, batch.answers, strict=True)):
            if isinstance(answer, Answer):
                stage = _stage_of(batch, number, answer, device_of(pool))
                self._chains.answered(request, answer, batch.sizes[number], stage)
            else:
                self._chains.unanswered(request, answer, is_device_error=is_device_error, is_lost=batch.is_lost)

    def _note_health(self, batch: Batch) -> None:
        if batch.device_error is None:
            if batch.has_answers and self._health.batch_answered(batch.executor):
                self._note_failures()
            return
        self._chains.last_error = f"executor {batch.executor}: {batch.device_error}"
        if not batch.is_lost:  # else `device_lost` follows
            self._health.batch_failed(batch.executor, batch.device_error, self._clock())
        self._note_failures()

    # Hangs

    def _check_for_hangs(self, now: float) -> None:
        batches, loads = self._work.hung_batches(now), self._work.hung_loads(now)
        for batch, seconds in batches:
            self._leave_batch(batch, seconds, now)
        for load, seconds in loads:  # resident experts continue, and the disk may recover
            expert = name_of(load.expert)
            self._log.error("load_hung", expert=expert, device=load.pool, seconds=round(seconds, 1))
            self._chains.last_error = f"the load of {expert} to {load.pool} did not end within {seconds:.0f} s"
            self._chains.park(self._scheduler.load_hung(load))
        if batches or loads:
            self._note_failures()

    def _leave_batch(self, batch: Batch, seconds: float, now: float) -> None:
        """Retry all images but the one whose decoding hangs; else blame the expert, or another PC's device."""
        executor, expert, decoding = batch.executor, batch.spec.name, batch.decoding
        is_remote = self._work.pool_of(executor) in self._remote_pools
        images = self._chains.image_names(batch.requests)
        self._log.error("executor_hung", executor=executor, expert=expert, images=images, seconds=round(seconds, 1))
        self._scheduler.batch_hung(executor)
        if decoding is not None:
            self._chains.end_as_bad(batch.requests[decoding], f"its decoding did not end within {seconds:.0f} s")
        else:
            reason = f"a batch of {expert} on {executor} did not end within {seconds:.0f} s"
            self._chains.last_error = reason
            if not is_remote:  # else `device_lost` follows
                self._health.batch_failed(executor, reason, now)
                if self._health.hangs_again(batch.spec.expert):
                    self._log.error("expert_hangs", expert=expert, reason=reason)
                    why = f"{reason}, twice; replace the expert and reload"
                    self._chains.end_all(self._scheduler.fail(batch.spec.expert, why))
        for number, request in enumerate(batch.requests):
            if number != decoding:
                self._chains.retry(request, MAX_LOSSES if is_remote else 1)

    def _take_editions(self, newest: Served) -> None:
        pools = self._scheduler.snapshot().pools
        self._serving.add(newest)
        lost = self._scheduler.replace_facts(facts_of((newest, *self._serving.all()), self._usage))
        self._chains.take_editions()
        self._health.forget_hangs()
        self._chains.end_all(lost)
        self._note_failures()
        if not self._failing:
            self._chains.last_error = None
        self._pin_new_versions(newest, [(expert, pool.pool) for pool in pools for expert in pool.pinned])

    def _end_editions(self, numbers: list[int]) -> None:
        self._serving.end(numbers)
        self._take_editions(self._serving.current)
        self._reports.editions_ended(numbers)

    def _pin_new_versions(self, served: Served, pins: Iterable[tuple[ExpertId, PoolId]]) -> None:
        """Pin what took the place of a pinned expert under its name, instead of it."""
        newest = resident_in(served.catalog)
        by_name = {spec.name: expert for expert, spec in newest.items()}
        for expert, pool in pins:
            if expert not in newest and (name := name_of(expert)) in by_name:
                try:
                    if expert in self._chains.resident:
                        self._scheduler.unpin(expert, pool)
                    self._scheduler.pin(by_name[name], pool)
                except OperationRefusedError as error:
                    self._chains.last_error = f"{name} is not pinned any more: {error.reason}"

    def _note_failures(self) -> None:
        failed = self._scheduler.snapshot().failed or self._health.out_of_service() or self._work.hanging()
        if self._failing and not failed:
            self._chains.last_error = None
        self._failing = bool(failed)

    def _answer(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        own = {"status": self._status, "memory": self._memory}.get(kind)
        return own() if own else self._control.answer(kind, fields)

    def _status(self) -> dict[str, Any]:
        now = self._scheduler.snapshot()
        self._note_failures()
        facts = self._makeup.executors
        self.last_status = {
            "policy": self._makeup.policy,
            "executors": executor_rows(facts, now, self._work.busy_shares(), self._health.out_of_service()),
            "expert_switches": self._switches,
            "completed": self._chains.completed,
            "under_way": self._chains.under_way,
            "failed": {name_of(expert): why for expert, why in now.failed.items()},
            "last_error": self._chains.last_error,
            "pools": pool_rows(facts, now),
            "queued": dict(zip(("by_device", "unloaded"), queue_lengths(now), strict=True)),
            "retries": self._chains.retries,
        }
        return dict(self.last_status)

    def _memory(self) -> dict[str, Any]:
        return {"pools": memory_rows(self._makeup.executors, self._scheduler.snapshot(), self._chains.resident)}


def facts_of(served: Iterable[Served], usage: Mapping[str, float] | None = None) -> tuple[ExpertFacts, ...]:
    """Return the facts of all that serves: the first edition's usage counts, the others only finish."""
    facts: dict[ExpertId, ExpertFacts] = {}
    for place, each in enumerate(served):
        of_edition = expert_facts(each.catalog.values(), each.routes, usage)
        facts = {one.expert: one if place == 0 else replace(one, usage=0.0) for one in of_edition} | facts
    return tuple(facts.values())


# Rows of the results


def _stage_of(batch: Batch, number: int, answer: Answer, device: str) -> Stage:
    """Return a row of `stages`. `load_ms` is the batch's wait for a load, 0 if its expert was resident."""
    spec = batch.expert_of(number)
    return Stage(
        expert=spec.name,
        expert_version=spec.version,
        label=answer.label,
        confidence=answer.confidence,
        detections=answer.detections,
        device=device,
        executor=batch.executor,
        batch_id=batch.number,
        batch_size=len(batch.images),
        queued_ms=max(0.0, batch.started_s - batch.requests[number].arrived_s) * 1000.0,
        load_ms=batch.load_ms,
        infer_ms=batch.infer_ms,
        expert_settings=spec.settings_digest,
        settings=spec.settings,
    )


def _record_of(batch: Batch, device: str, wall_ahead_s: float) -> BatchDone:
    """Return a batch's record. `wall_ahead_s` is wall clock minus drive clock."""
    return BatchDone(
        executor=batch.executor,
        device=device,
        expert=batch.spec.name,
        architecture=batch.spec.architecture,
        step=batch.requests[0].step,
        images=len(batch.images),
        started_wall_s=batch.started_s + wall_ahead_s,
        ended_wall_s=batch.ended_s + wall_ahead_s,
        load_ms=batch.load_ms,
        infer_ms=batch.infer_ms,
        waits=[(request.step, max(0.0, batch.started_s - request.arrived_s) * 1000.0) for request in batch.requests],
    )


def _switch_of(end: LoadEnd, at_wall_s: float) -> ExpertSwitch:
    load = end.load
    return ExpertSwitch(
        at_wall_s=at_wall_s,
        executor=load.pool,
        device=device_of(load.pool),
        loaded=name_of(load.expert),
        evicted=tuple(map(name_of, load.evict)),
        bytes=end.bytes,
        load_ms=end.load_ms,
        tier=end.tier,
        cause=load.cause,
    )
