"""The drive thread: the only one that touches the scheduler. Events in, actions carried out, outcomes out.

Everything that happens (images accepted, loads and batches ended, an operator's wish) is an event in one queue.
After each the scheduler is asked what to do next, its loads go to the loaders and its batches to the executors.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from daemon.chain import Chains, ImageAnswer
from daemon.desk import Desk, executor_rows
from daemon.events import Ask, Event, Events, Reload, Stop, answer_of
from daemon.gauge import BusyGauge
from daemon.health import Health
from daemon.orders import (
    Answered,
    BatchOrder,
    BatchReport,
    Executor,
    ImageOrder,
    LoadEnd,
    Loader,
    LoadOrder,
    Unanswered,
)
from daemon.policy.actions import Load, Resize, Run, Unload, Wait
from daemon.policy.matrix import Performance
from daemon.policy.predict import expert_facts
from daemon.policy.presets import Tuning
from daemon.policy.request import ExecutorId, PoolFacts, PoolId, Request
from daemon.records import Accepted, ExpertSwitch, Outcome
from daemon.rulebook import Rulebook
from daemon.stages import stage_of, switch_of
from daemon.trace import Makeup, RecordingScheduler
from experts.spec import ExpertId, ExpertSpec
from routing_rules.routes import Routes

#: The pause after a turn that failed by our own fault, so that it cannot spin.
_AFTER_DEFECT_S = 0.5

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Running:
    run: Run
    order: BatchOrder
    load_ms: float
    since_s: float


class Drive:
    """Wired from plain values and callables.

    `rulebook.get(version)` gives the routes of an image's board attempt; `catalog` is read whole at each reload.
    `pools` and each executor's and loader's own facts are as `assign.partition` made them for `policy`; `matrix` and
    `usage` are what a profile has measured and counted. `on_outcome`, `on_switch` and `on_bad_image` (an image that
    decoding found bad, and why) are called on the drive thread and must not block. `record` is a file for a trace
    (trace.py). Batches are numbered above `last_batch_id`, for the results' views tell them apart by number. `clock`
    is monotonic seconds, `wall` seconds since the epoch.
    """

    def __init__(  # noqa: PLR0913  app.py names each part it wires
        self,
        *,
        rulebook: Rulebook,
        catalog: Mapping[ExpertId, ExpertSpec],
        pools: Sequence[PoolFacts],
        executors: Sequence[Executor],
        loaders: Sequence[Loader],
        policy: str,
        matrix: Iterable[Performance] = (),
        usage: Mapping[ExpertId, float] | None = None,
        on_outcome: Callable[[Outcome], None],
        on_switch: Callable[[ExpertSwitch], None],
        on_bad_image: Callable[[Accepted, str], None] = lambda _image, _reason: None,
        tuning: Tuning | None = None,
        record: Path | None = None,
        last_batch_id: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._catalog = dict(catalog)
        self._executors = {executor.facts.executor: executor for executor in executors}
        self._loaders = {loader.pool: loader for loader in loaders}
        self._on_outcome, self._on_switch, self._on_bad_image = on_outcome, on_switch, on_bad_image
        self._clock, self._wall = clock, wall
        self._log: Any = structlog.get_logger("drive")
        self._usage = dict(usage or {})
        self._makeup = Makeup(
            experts=expert_facts(self._catalog.values(), rulebook.current, self._usage),
            pools=tuple(pools),
            executors=tuple(executor.facts for executor in executors),
            policy=policy,
            tuning=tuning or Tuning(),
            matrix=tuple(matrix),
        )
        self._scheduler = RecordingScheduler(self._makeup, record) if record else self._makeup.scheduler()
        self._chains = Chains(rulebook.get, clock, wall)
        self._health = Health(self._makeup.executors, self._scheduler)
        self._desk = Desk(self._scheduler, lambda: self._catalog, self._health.is_lost)
        self._events = Events()
        self._thread = threading.Thread(target=self._loop, name="drive", daemon=True)
        self._running: dict[ExecutorId, _Running] = {}
        self._busy = {name: BusyGauge(clock()) for name in self._executors}
        self._fresh_load_ms: dict[tuple[PoolId, ExpertId], float] = {}
        self._refusals: dict[ExpertId, str] = {}
        self._last_batch_id = last_batch_id
        self._switches = 0
        self._completed = 0
        self._last_error: str | None = None
        self._stopping = False
        self._loading: Counter[PoolId] = Counter()
        self._filling = set(self._loaders)
        self._failing = False

    # From any thread

    def start(self) -> None:
        """Start loaders, executors and the drive. Images are served at once; the pools fill meanwhile."""
        self.start_hands()
        self._thread.start()

    def start_hands(self) -> None:
        """Start loaders and executors only: for whoever calls `turn` instead of having a drive thread."""
        for loader in self._loaders.values():
            loader.start(self._events.put)
        for executor in self._executors.values():
            executor.start(self._events.put)

    def accept(self, images: Sequence[Accepted]) -> None:
        self._events.put(tuple(images))

    def ask(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one of control's requests, on the drive thread. Raises ControlError."""
        return self._answer_of(self.ask_later(kind, fields))

    def ask_later(self, kind: str, fields: Mapping[str, Any]) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        self._events.put(Ask(kind, fields, answer))
        return answer

    def reload(self, catalog: Mapping[ExpertId, ExpertSpec], routes: Routes) -> None:
        """Other experts and usage from now on; returns when they are in force.

        Call it before `Rulebook.replace`: an image under new rules must not meet a catalog without their experts.
        """
        self._answer_of(self.reload_later(catalog, routes))

    def reload_later(self, catalog: Mapping[ExpertId, ExpertSpec], routes: Routes) -> Future[None]:
        done: Future[None] = Future()
        self._events.put(Reload(dict(catalog), routes, done))
        return done

    def stop(self, timeout_s: float) -> bool:
        """Begin nothing new, report what runs, end. What waits stays in the journal. False: it took too long."""
        deadline_s = time.monotonic() + timeout_s
        self._events.put(Stop())
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        stopped = not self._thread.is_alive()
        for hand in (*self._executors.values(), *self._loaders.values()):
            stopped &= hand.stop(max(0.0, deadline_s - time.monotonic()))
        if isinstance(self._scheduler, RecordingScheduler) and not self._thread.is_alive():
            self._scheduler.close()
        return stopped

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_filling(self) -> bool:
        """Whether the pools' initial fill goes on; a line that has answered an image is not at its start any more."""
        return bool(self._filling) and self._completed == 0

    @property
    def is_failing(self) -> bool:
        """Whether an expert could not be loaded when it was last tried, or an executor is out of service."""
        return self._failing

    # The drive thread

    def turn(self, timeout_s: float | None = 0.0) -> float | None:
        """Handle the events that are there, waiting `timeout_s` for the first, and decide.

        Returns when, on the drive's clock, to turn again although nothing was reported; None: when something is.
        """
        for event in self._events.take(timeout_s):
            self._handle(event)
        return None if self._stopping else self._decide()

    def _loop(self) -> None:
        until_s: float | None = self._clock()
        while not (self._stopping and not self._running):
            timeout_s = None if until_s is None else max(0.0, until_s - self._clock())
            try:
                until_s = self.turn(timeout_s)
            except Exception as error:  # noqa: BLE001  a defect of ours must not end the line; what it touched is logged
                self._log.exception("drive_defect")
                self._last_error = f"{type(error).__name__}: {error}"
                until_s = self._clock() + _AFTER_DEFECT_S
                time.sleep(_AFTER_DEFECT_S)
        self._events.refuse_the_rest()

    def _handle(self, event: Event) -> None:
        match event:
            case BatchReport():
                self._batch_ended(event)
            case LoadEnd():
                self._load_ended(event)
            case Ask():
                self._answer(event)
            case Reload():
                self._replace(event)
            case Stop():
                self._stopping = True
            case images if not self._stopping:
                for accepted in images:
                    self._go_on(self._chains.admit(accepted))
            case _:
                pass

    def _decide(self) -> float | None:
        now = self._clock()
        for request in self._scheduler.expire(now):
            self._end(request, "deadline")
        wakes = [self._health.next_try_s(now)]
        for pool, loader in self._loaders.items():
            while not isinstance(change := self._scheduler.next_load(pool, now), Wait):
                self._change(loader, change)
            wakes.append(change.until_s)
            if not self._loading[pool]:
                self._filling.discard(pool)  # the fill is what a loader does when nothing else is wanted
        for name, executor in self._executors.items():
            if name in self._running or self._health.rests(name, now):
                continue
            action = self._scheduler.next_action(name, now)
            if isinstance(action, Run):
                self._run(executor, action, now)
            else:
                wakes.append(action.until_s)
        return min((until_s for until_s in wakes if until_s is not None), default=None)

    def _change(self, loader: Loader, change: Load | Unload | Resize) -> None:
        if isinstance(change, Load):
            self._loading[change.pool] += 1
            loader.submit(LoadOrder(change, self._catalog[change.expert]))
        else:
            loader.submit(change)

    def _run(self, executor: Executor, run: Run, now: float) -> None:
        self._last_batch_id += 1
        images: list[ImageOrder] = []
        for request in run.batch:
            accepted = self._chains.accepted(request.request_id)
            images.append(ImageOrder(request.request_id, accepted.key, accepted.pixels))
        order = BatchOrder(self._last_batch_id, self._catalog[run.expert], tuple(images))
        load_ms = self._fresh_load_ms.pop((executor.facts.pool, run.expert), 0.0)
        self._running[run.executor] = _Running(run, order, load_ms, now)
        executor.submit(order)

    def _load_ended(self, end: LoadEnd) -> None:
        load, now = end.load, self._clock()
        self._loading[load.pool] -= 1
        if end.error is not None:
            self._last_error = end.error
            for request in self._scheduler.load_failed(load, end.error, now, end.is_device_error):
                self._end(request, "expert_failed")
            if end.is_device_error:
                self._health.load_failed(load.pool, end.error, now)
            self._note_failures()
            return
        self._scheduler.load_done(load, end.load_ms / 1000.0)
        if self._failing:
            self._note_failures()
        self._fresh_load_ms[load.pool, load.expert] = end.load_ms
        self._switches += load.cause != "startup"
        self._on_switch(switch_of(end, self._wall()))

    def _batch_ended(self, report: BatchReport) -> None:
        running = self._running.pop(report.executor)
        self._busy[report.executor].add(report.started_s, report.ended_s)
        if report.memory_limit is not None:
            self._scheduler.limit_batch(report.executor, running.run.expert, report.memory_limit)
        # Before any next step arrives: until then the scheduler counts this batch as about to send some.
        if any(isinstance(result, Answered) for result in report.results):
            self._scheduler.batch_done(report.executor, report.ended_s - report.started_s)
        else:
            self._scheduler.batch_failed(report.executor)
        self._note_health(report)
        pool = self._executors[report.executor].facts.pool
        for request, result in zip(running.run.batch, report.results, strict=True):
            if isinstance(result, Answered):
                stage = stage_of(request, result, running.order, report, pool, running.load_ms)
                found = ImageAnswer(request.request_id, result.answer, result.image_size, stage)
                self._go_on(self._chains.answered(found, self._clock()))
            else:
                self._unanswered(request, result, is_device_error=report.device_error is not None)

    def _unanswered(self, request: Request, result: Unanswered, *, is_device_error: bool) -> None:
        """The image ends, but where its batch's device has failed: that is no fault of it, and it may try once more."""
        if result.fault == "bad_image":
            self._on_bad_image(self._chains.accepted(request.request_id), result.detail)
        elif not is_device_error:
            self._last_error = f"expert {request.expert}: {result.detail}"
        elif (again := self._chains.again(request.request_id)) is not None:
            self._go_on(again)
            return
        self._end(request, result.fault)

    def _note_health(self, report: BatchReport) -> None:
        if report.device_error is None:
            was_answered = any(isinstance(result, Answered) for result in report.results)
            if was_answered and self._health.well(report.executor):
                self._note_failures()
            return
        self._last_error = f"executor {report.executor}: {report.device_error}"
        self._health.batch_failed(report.executor, report.device_error, self._clock())
        self._note_failures()

    def _go_on(self, step: Request | Outcome) -> None:
        """Queue a chain's next request, or let the image end."""
        if isinstance(step, Outcome):
            self._finish(step)
            return
        if self._stopping:
            return  # it stays in the journal, and starts its chain again with the next start
        refused = self._scheduler.arrive(step, self._clock())
        if refused is not None:
            if self._refusals.get(step.expert) != refused:
                self._refusals[step.expert] = self._last_error = refused
                self._log.error("expert_unusable", expert=step.expert, reason=refused)
            self._end(step, "expert_failed" if step.expert in self._catalog else "rules_changed")

    def _end(self, request: Request, reason: str) -> None:
        self._finish(self._chains.ended(request.request_id, reason))

    def _finish(self, outcome: Outcome) -> None:
        self._completed += 1
        self._on_outcome(outcome)

    def _replace(self, reload: Reload) -> None:
        changed = [expert for expert, spec in reload.catalog.items() if self._catalog.get(expert, spec) != spec]
        facts = expert_facts(reload.catalog.values(), reload.routes, self._usage)
        self._catalog = dict(reload.catalog)
        self._refusals.clear()
        for request in self._scheduler.replace_facts(facts, changed):
            self._end(request, "expert_failed" if request.expert in self._catalog else "rules_changed")
        self._note_failures()
        reload.answer.set_result(None)

    def _note_failures(self) -> None:
        self._failing = bool(self._scheduler.snapshot().failed) or bool(self._health.out_of_service())

    def _answer(self, ask: Ask) -> None:
        try:
            answer = self._status() if ask.kind == "status" else self._desk.answer(ask.kind, ask.fields)
        except Exception as error:  # noqa: BLE001  whoever asked gets it
            ask.answer.set_exception(error)
        else:
            ask.answer.set_result(answer)

    def _status(self) -> dict[str, Any]:
        """This thread's part of control's `status`; `under_way` counts images between acceptance and verdict."""
        now = self._scheduler.snapshot()
        self._note_failures()
        clock_s = self._clock()
        busy_shares: dict[ExecutorId, float] = {}
        for name, gauge in self._busy.items():
            running = self._running.get(name)
            busy_shares[name] = gauge.share(clock_s, None if running is None else running.since_s)
        facts = [executor.facts for executor in self._executors.values()]
        return {
            "policy": self._makeup.policy,
            "executors": executor_rows(facts, now, busy_shares, self._health.out_of_service()),
            "expert_switches": self._switches,
            "completed": self._completed,
            "under_way": len(self._chains),
            "failed": dict(now.failed),
            "last_error": self._last_error,
        }

    def _answer_of(self, answer: Future[R]) -> R:
        if self._thread.ident is not None and not self._thread.is_alive():
            self._events.refuse_the_rest()
        return answer_of(answer)
