"""Executors and loaders as the drive sees them: what each does just now, and what hangs.

What hangs is left behind: its thread, its memory and what it holds stay until it ends by itself, if ever, and a new
thread goes on in its place.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daemon.dispatch.busy_share import BusyShare
from daemon.dispatch.orders import BatchOrder, BatchReport, Executor, LoadEnd, Loader, LoadOrder
from daemon.policy.actions import Load, Resize, Run, Unload
from daemon.policy.request import ExecutorId, PoolId, RequestId
from daemon.policy.watch import Watch

#: Threads of one executor that may hang at once; with more it is given no batch until one of them ends.
_MOST_LEFT = 4


@dataclass(frozen=True, slots=True)
class Running:
    """A batch under way. `load_ms` is how long it waited for a load."""

    run: Run
    order: BatchOrder
    load_ms: float
    since_s: float


@dataclass(frozen=True, slots=True)
class HungBatch:
    """A batch that was given up after `seconds`. `preparing`: the image that was being decoded, if that is where."""

    running: Running
    seconds: float
    preparing: RequestId | None


@dataclass(frozen=True, slots=True)
class HungLoad:
    load: Load
    seconds: float


class RunningWork:
    """One batch per executor, loads as the loaders take them. Drive thread only."""

    def __init__(
        self,
        executors: Sequence[Executor],
        loaders: Sequence[Loader],
        hang_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.executors = {executor.facts.executor: executor for executor in executors}
        self.loaders = {loader.pool: loader for loader in loaders}
        self._clock = clock
        self._hang_after_s = hang_after_s
        self.running: dict[ExecutorId, Running] = {}
        self._busy = {name: BusyShare(clock()) for name in self.executors}
        self._batches: Watch[ExecutorId] = Watch(hang_after_s)
        self._left_behind: dict[int, Running] = {}
        self._loading: Counter[PoolId] = Counter()
        self._loads: Watch[Load] = Watch(hang_after_s)
        self._hung_loads: dict[tuple[PoolId, str], HungLoad] = {}

    def start(self, report: Callable[[BatchReport | LoadEnd], None]) -> None:
        for loader in self.loaders.values():
            loader.start(report)
        for executor in self.executors.values():
            executor.start(report)

    def stop(self, deadline_s: float) -> bool:
        """Let all of them end; False where one still worked at `deadline_s`. What was left behind is not waited for."""
        stopped = True
        for hand in (*self.executors.values(), *self.loaders.values()):
            stopped &= hand.stop(max(0.0, deadline_s - self._clock()))
        return stopped

    def pool_of(self, executor: ExecutorId) -> PoolId:
        return self.executors[executor].facts.pool

    def hanging(self) -> list[str]:
        """What hangs just now, in words."""
        batches = [f"a batch of {left.run.expert} on {left.run.executor}" for left in self._left_behind.values()]
        return batches + [f"the load of {hung.load.expert} to {hung.load.pool}" for hung in self._hung_loads.values()]

    def busy_shares(self) -> dict[ExecutorId, float]:
        now = self._clock()
        return {
            name: gauge.share(now, self.running[name].since_s if name in self.running else None)
            for name, gauge in self._busy.items()
        }

    # Batches

    def may_take(self, executor: ExecutorId) -> bool:
        """Whether `executor` is idle, and has not left too many threads behind."""
        if executor in self.running:
            return False
        return not self._left_behind or (
            sum(left.run.executor == executor for left in self._left_behind.values()) < _MOST_LEFT
        )

    def begin(self, running: Running, predicted_s: float | None) -> None:
        name = running.run.executor
        self.running[name] = running
        self._batches.begin(name, running.since_s, predicted_s, len(running.run.batch))
        self.executors[name].submit(running.order)

    def ended(self, report: BatchReport) -> tuple[Running, bool]:
        """The batch of `report`, and whether it had been given up and is nobody's concern any more."""
        left = self._left_behind.pop(report.batch_id, None)
        if left is not None:
            return left, True
        running = self.running.pop(report.executor)
        self._batches.end(report.executor)
        self._busy[report.executor].add(report.started_s, report.ended_s)
        return running, False

    def hung_batches(self, now: float) -> list[HungBatch]:
        """Batches that take too long: each is left behind with its thread, and its executor is free."""
        found: list[HungBatch] = []
        for name, seconds in self._batches.overdue(now):
            running, executor = self.running.pop(name), self.executors[name]
            self._left_behind[running.order.batch_id] = running
            found.append(HungBatch(running, seconds, executor.give_up()))
        return found

    # Loads

    def change(self, pool: PoolId, change: LoadOrder | Unload | Resize) -> None:
        self._loading[pool] += isinstance(change, LoadOrder)
        self.loaders[pool].apply(change)

    def is_loading(self, pool: PoolId) -> bool:
        return self._loading[pool] > 0

    def load_ended(self, end: LoadEnd) -> bool:
        """Whether the load had been given up; what it brought is unloaded again then."""
        load = end.load
        if self._hung_loads.pop((load.pool, load.expert), None) is not None:
            if end.error is None:
                self.loaders[load.pool].apply(Unload(load.pool, (load.expert,)))
            return True
        self._loading[load.pool] -= 1
        self._loads.end(load)
        return False

    def hung_loads(self, now: float) -> list[HungLoad]:
        """Loads whose transfer takes too long: their channel goes on with others, where it can."""
        if not self._loading.total():
            return []
        for loader in self.loaders.values():
            for load, began_s in loader.under_way():
                if load not in self._loads and (load.pool, load.expert) not in self._hung_loads:
                    self._loads.begin(load, began_s, None)
        found = [HungLoad(load, seconds) for load, seconds in self._loads.overdue(now)]
        for hung in found:
            self._loading[hung.load.pool] -= 1
            self._hung_loads[hung.load.pool, hung.load.expert] = hung
            self.loaders[hung.load.pool].give_up(hung.load)
        return found

    def next_look_s(self, now: float) -> float | None:
        """When something may turn out to hang: the next look at the latest."""
        due = [self._batches.next_s(), self._loads.next_s()]
        if self._loading.total():
            due.append(now + self._hang_after_s)  # a transfer that begins meanwhile is not known yet
        return min((time_s for time_s in due if time_s is not None), default=None)
