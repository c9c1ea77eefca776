"""Batches and loads that run or hang, and executors out of service. Drive thread only.

Hung work is left behind: its thread keeps its memory until it ends, if ever, and a new thread takes over.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from daemon.dispatch.pool import Batch, LoadEnd, Pool
from daemon.policy.actions import Load, Resize, Unload
from daemon.policy.operate import OperationRefusedError
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolId, device_of
from daemon.policy.scheduler import Scheduler
from experts.spec import ExpertId, ExpertSpec, name_of

K = TypeVar("K", bound=Hashable)

#: Hung threads of one executor; beyond this number it gets no batch until one of them ends.
_MAX_HUNG_THREADS = 4
#: Work that takes this many times the predicted time does not end on its own.
_FACTOR = 20.0
#: Checks within the shortest patience. Each counts at most two intervals: a process that stood still (suspended, in a
#: debugger, a paused machine) counts the time in which it ran.
_CHECKS = 30
_ROUNDING_S = 1e-6


class Watch(Generic[K]):
    """Running work by key. Call `overdue` at `next_s`. Counts only time in which this process ran."""

    def __init__(self, hang_after_s: float) -> None:
        self._hang_after_s = hang_after_s
        self.check_every_s = hang_after_s / _CHECKS
        #: When each began and how long it may take, in seconds of running.
        self._watched: dict[K, tuple[float, float]] = {}
        self._ran_s = self._checked_s = 0.0

    def __contains__(self, key: K) -> bool:
        return key in self._watched

    def begin(self, key: K, began_s: float, predicted_s: float | None, pieces: int = 1) -> None:
        """Watch `key`. Without a prediction each of its `pieces` may take `hang_after_s`."""
        patience_s = self._hang_after_s * pieces
        if predicted_s is not None:
            patience_s = max(self._hang_after_s, _FACTOR * predicted_s)
        self._count_to(began_s)
        self._watched[key] = self._ran_s, patience_s

    def end(self, key: K) -> None:
        self._watched.pop(key, None)

    def overdue(self, now: float) -> list[tuple[K, float]]:
        """Return keys whose time is up with their seconds, and stop watching them."""
        self._count_to(now)
        took_s = [(key, self._ran_s - began_s, patience_s) for key, (began_s, patience_s) in self._watched.items()]
        late = [(key, s) for key, s, patience_s in took_s if s > patience_s - _ROUNDING_S]
        for key, _ in late:
            del self._watched[key]
        return late

    def next_s(self) -> float | None:
        ends_s = [began_s + patience_s for began_s, patience_s in self._watched.values()]
        return self._checked_s + min(self.check_every_s, min(ends_s) - self._ran_s) if ends_s else None

    def _count_to(self, now: float) -> None:
        if now > self._checked_s:
            self._ran_s += min(now - self._checked_s, 2 * self.check_every_s)
            self._checked_s = now


class RunningWork:
    """At most one batch per executor, and any number of loads per pool; `report` gets their ends, on any thread."""

    def __init__(
        self,
        pools: Mapping[PoolId, Pool],
        executors: Iterable[ExecutorFacts],
        hang_after_s: float,
        clock: Callable[[], float],
        report: Callable[[Batch | LoadEnd], None],
    ) -> None:
        self.pools = pools
        self._pool_of = {facts.executor: facts.pool for facts in executors}
        self._clock, self._report = clock, report
        self.running: dict[ExecutorId, Batch] = {}
        self._busy = {name: BusyShare(clock()) for name in self._pool_of}
        self._batches: Watch[ExecutorId] = Watch(hang_after_s)
        self._left_behind: dict[int, Batch] = {}
        self._loading: Counter[PoolId] = Counter()
        self._loads: Watch[Load] = Watch(hang_after_s)
        self._hung_loads: dict[tuple[PoolId, ExpertId], Load] = {}

    def start(self) -> None:
        for pool in self.pools.values():
            pool.start()

    def stop(self, deadline_s: float) -> bool:
        """Stop all devices; False if one still worked at `deadline_s`. Hung threads are not waited for."""
        stopped = [pool.stop(max(0.0, deadline_s - self._clock())) for pool in self.pools.values()]
        return all(stopped)

    def pool_of(self, executor: ExecutorId) -> PoolId:
        return self._pool_of[executor]

    def hanging(self) -> list[str]:
        batches = [f"a batch of {batch.spec.name} on {batch.executor}" for batch in self._left_behind.values()]
        return batches + [f"the load of {name_of(load.expert)} to {load.pool}" for load in self._hung_loads.values()]

    def busy_shares(self) -> dict[ExecutorId, float]:
        now = self._clock()
        return {
            name: gauge.share(now, self.running[name].began_s if name in self.running else None)
            for name, gauge in self._busy.items()
        }

    # Batches

    def idle(self) -> list[ExecutorId]:
        hung = Counter(batch.executor for batch in self._left_behind.values()) if self._left_behind else {}
        return [name for name in self._pool_of if name not in self.running and hung.get(name, 0) < _MAX_HUNG_THREADS]

    def begin(self, batch: Batch, predicted_s: float | None) -> None:
        self.running[batch.executor] = batch
        self._batches.begin(batch.executor, batch.began_s, predicted_s, len(batch.images))
        self.pools[self.pool_of(batch.executor)].run(batch, self._report)

    def ended(self, batch: Batch) -> None:
        if batch.is_abandoned:
            del self._left_behind[batch.number]
            return
        del self.running[batch.executor]
        self._batches.end(batch.executor)
        self._busy[batch.executor].add(batch.started_s, batch.ended_s)

    def hung_batches(self, now: float) -> list[tuple[Batch, float]]:
        """Abandon batches that take too long and return them with their seconds; their executors become free."""
        hung_batches: list[tuple[Batch, float]] = []
        for name, seconds in self._batches.overdue(now):
            batch = self.running.pop(name)
            self._left_behind[batch.number] = batch
            batch.is_abandoned = True
            self.pools[self.pool_of(name)].abandon_batch(batch)
            hung_batches.append((batch, seconds))
        return hung_batches

    # Loads

    def change(self, change: Load | Unload | Resize, specs: Mapping[ExpertId, ExpertSpec]) -> None:
        pool = self.pools[change.pool]
        match change:
            case Load():
                self._loading[change.pool] += 1
                pool.load(change, specs[change.expert], self._report)
            case Unload():
                pool.unload(change.experts)
            case Resize():
                pool.resize(change.budget_bytes)

    def is_loading(self, pool: PoolId) -> bool:
        return self._loading[pool] > 0

    def load_ended(self, end: LoadEnd) -> bool:
        """Return True if the load had been given up before; what it loaded is then unloaded again."""
        load = end.load
        if self._hung_loads.pop((load.pool, load.expert), None) is not None:
            if end.error is None:
                self.pools[load.pool].unload((load.expert,))
            return True
        self._loading[load.pool] -= 1
        self._loads.end(load)
        return False

    def hung_loads(self, now: float) -> list[tuple[Load, float]]:
        """Return the loads that take too long, with their seconds; their channel goes on with others if it can."""
        if not self._loading.total():
            return []
        for pool in self.pools.values():
            for load, began_s in pool.loads_under_way():
                if load not in self._loads and (load.pool, load.expert) not in self._hung_loads:
                    self._loads.begin(load, began_s, None)
        hung_loads = self._loads.overdue(now)
        for load, _ in hung_loads:
            self._loading[load.pool] -= 1
            self._hung_loads[load.pool, load.expert] = load
            self.pools[load.pool].abandon_load(load)
        return hung_loads

    def next_check_s(self, now: float) -> float | None:
        due = [self._batches.next_s(), self._loads.next_s()]
        if self._loading.total():
            due.append(now + self._loads.check_every_s)  # a transfer that begins meanwhile is not watched yet
        return min((time_s for time_s in due if time_s is not None), default=None)


class BusyShare:
    """The share of time spent busy, from 0 to 1: over two half-overlapping windows of `window_s`, O(1) per report."""

    def __init__(self, now: float, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._began_s = now
        self._busy_s = 0.0
        self._before_s = 0.0
        self._before_busy_s = 0.0

    def add(self, started_s: float, ended_s: float) -> None:
        self._roll(ended_s)
        self._busy_s += ended_s - started_s

    def share(self, now: float, running_since_s: float | None = None) -> float:
        """`running_since_s` is when the current work began, None if idle."""
        self._roll(now)
        busy_s = self._before_busy_s + self._busy_s
        if running_since_s is not None:
            busy_s += now - running_since_s
        seconds = self._before_s + now - self._began_s
        return min(1.0, busy_s / seconds) if seconds > 0.0 else 0.0

    def _roll(self, now: float) -> None:
        if now - self._began_s >= self._window_s:
            self._before_s, self._before_busy_s = now - self._began_s, self._busy_s
            self._began_s, self._busy_s = now, 0.0


#: Consecutive device errors that take an executor out of service. One may be an accident; a lost CUDA context fails
#: every time.
_MAX_ERRORS = 3
#: Hangs of one expert after which it is no longer used.
_MAX_HANGS = 2
#: Retry interval of a device whose experts no other device can serve: it may come back.
_RETRY_S = 30.0


@dataclass(slots=True)
class _State:
    pool: PoolId
    errors: int = 0
    reason: str | None = None
    retry_s: float = 0.0


class ExecutorHealth:
    """Executors out of service because of repeated errors of their devices. `now` is seconds on the drive's clock.

    An executor out of service runs nothing until a restart. Others of its pool go on; if there are none, the pool's
    experts move to other devices. Only if they cannot move is the executor retried, with one batch each `_RETRY_S`. A
    device of another PC is out of service while it is gone, and no longer.
    """

    def __init__(self, executors: Iterable[ExecutorFacts], scheduler: Scheduler) -> None:
        self._states = {facts.executor: _State(facts.pool) for facts in executors}
        self._scheduler = scheduler
        self._budgets_bytes = scheduler.budgets()
        self._hangs: Counter[ExpertId] = Counter()
        self._log: Any = structlog.get_logger("health")

    def batch_answered(self, executor: ExecutorId) -> bool:
        state = self._states[executor]
        was_out = state.reason is not None
        state.errors, state.reason = 0, None
        return was_out

    def batch_failed(self, executor: ExecutorId, error: str, now: float) -> None:
        self._failed([executor], error, now)

    def hangs_again(self, expert: ExpertId) -> bool:
        """Count a hung batch of `expert`; return True if it is not the first, so that the expert is to blame."""
        self._hangs[expert] += 1
        return self._hangs[expert] >= _MAX_HANGS

    def forget_hangs(self) -> None:
        """Reset the counts: other rules and weights may be in force."""
        self._hangs.clear()

    def load_failed(self, pool: PoolId, error: str, now: float) -> None:
        self._failed([executor for executor, state in self._states.items() if state.pool == pool], error, now)

    def device_lost(self, device: str, reason: str, *, was_there: bool) -> None:
        """Take a device of another PC out of service until `device_back`: its experts are gone, if it `was_there`."""
        for pool in self._set(device, reason, math.inf):
            self._budgets_bytes[pool] = self._scheduler.budgets()[pool] or self._budgets_bytes[pool]
            self._scheduler.pool_lost(pool)
            self._give_up(pool, had_experts=was_there)
        if was_there:
            self._log.error("device_lost", device=device, reason=reason)
        else:
            self._log.warning("device_absent", device=device, reason=reason)

    def device_back(self, device: str) -> None:
        for pool in self._set(device, None, 0.0):
            self._scheduler.pool_back(pool)
            self._scheduler.set_budget(pool, self._budgets_bytes[pool])
        self._log.info("device_back", device=device)

    def _set(self, device: str, reason: str | None, retry_s: float) -> list[PoolId]:
        states = [state for state in self._states.values() if device_of(state.pool) == device]
        for state in states:
            state.errors, state.reason, state.retry_s = 0, reason, retry_s
        return list(dict.fromkeys(state.pool for state in states))

    def is_lost(self, pool: PoolId) -> bool:
        states = [state for state in self._states.values() if state.pool == pool]
        return bool(states) and all(state.reason is not None for state in states)

    def rests(self, executor: ExecutorId, now: float) -> bool:
        state = self._states[executor]
        return state.reason is not None and (now < state.retry_s or not self.is_lost(state.pool))

    def next_try_s(self, now: float) -> float | None:
        lost = (state for state in self._states.values() if state.retry_s > now and self.is_lost(state.pool))
        return min((state.retry_s for state in lost if state.retry_s != math.inf), default=None)

    def out_of_service(self) -> dict[ExecutorId, str]:
        return {executor: state.reason for executor, state in self._states.items() if state.reason is not None}

    def _failed(self, executors: list[ExecutorId], error: str, now: float) -> None:
        for executor in executors:
            state = self._states[executor]
            state.errors += 1
            if state.errors < _MAX_ERRORS:
                continue
            was_in_service, state.reason = state.reason is None, state.reason or error
            # For all executors of the pool: those that failed earlier must not retry as soon as the last one fails.
            for other in self._states.values():
                if other.pool == state.pool and other.retry_s != math.inf:
                    other.retry_s = now + _RETRY_S
            if was_in_service:
                self._log.error("executor_out_of_service", executor=executor, error=error)
                self._give_up(state.pool)

    def _give_up(self, pool: PoolId, *, had_experts: bool = True) -> None:
        """Move the experts of `pool` to other devices if no executor is left to use them."""
        if self.is_lost(pool):
            try:
                self._scheduler.set_budget(pool, 0)
            except OperationRefusedError as refused:
                if had_experts:
                    self._log.error("experts_cannot_move", device=pool, reason=refused.reason)
