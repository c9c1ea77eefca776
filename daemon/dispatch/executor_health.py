"""Which executors can be trusted with a batch: after repeated errors of its device one is taken out of service."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from daemon.policy.operate import RefusedError
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolId
from daemon.policy.scheduler import Scheduler
from experts.spec import ExpertId

#: Device errors one after the other that take an executor out of service: one may be an accident, a CUDA context
#: that is lost gives nothing else any more.
_ERRORS = 3
#: Hangs of one expert that take it out of use.
_HANGS = 2
#: Where nobody else can serve its experts, it is tried again this often: the device may come back.
_RETRY_S = 30.0


@dataclass(slots=True)
class _State:
    pool: PoolId
    errors: int = 0
    reason: str | None = None
    retry_s: float = 0.0


class ExecutorHealth:
    """Executors by the errors of their devices. `now` is seconds on the drive's clock.

    One that is out of service runs nothing more until a restart: another of its pool serves on, or where there is none
    its pool gives up its experts, which go to other devices. Only where they cannot go is it tried again, with a batch
    each `_RETRY_S`.
    """

    def __init__(self, executors: Iterable[ExecutorFacts], scheduler: Scheduler) -> None:
        self._states = {facts.executor: _State(facts.pool) for facts in executors}
        self._scheduler = scheduler
        self._hangs: Counter[ExpertId] = Counter()
        self._log: Any = structlog.get_logger("health")

    def well(self, executor: ExecutorId) -> bool:
        """A batch of `executor` was answered: its device works. True: it was out of service, and is back."""
        state = self._states[executor]
        was_out = state.reason is not None
        state.errors, state.reason = 0, None
        return was_out

    def batch_failed(self, executor: ExecutorId, error: str, now: float) -> None:
        """A batch failed by an error of its device."""
        self._failed([executor], error, now)

    def hangs_again(self, expert: ExpertId) -> bool:
        """A batch of `expert` hung, and it is not the first: it is the expert, not the moment."""
        self._hangs[expert] += 1
        return self._hangs[expert] >= _HANGS

    def forget_hangs(self) -> None:
        """Other rules and weights may be in force."""
        self._hangs.clear()

    def load_failed(self, pool: PoolId, error: str, now: float) -> None:
        """A load into `pool` failed by an error of its device."""
        self._failed([executor for executor, state in self._states.items() if state.pool == pool], error, now)

    def is_lost(self, pool: PoolId) -> bool:
        """Whether no executor of `pool` is in service."""
        mine = [state for state in self._states.values() if state.pool == pool]
        return bool(mine) and all(state.reason is not None for state in mine)

    def rests(self, executor: ExecutorId, now: float) -> bool:
        """Whether `executor` is to run nothing now."""
        state = self._states[executor]
        return state.reason is not None and (now < state.retry_s or not self.is_lost(state.pool))

    def next_try_s(self, now: float) -> float | None:
        """When an executor that rests is tried again."""
        lost = (state for state in self._states.values() if state.retry_s > now and self.is_lost(state.pool))
        return min((state.retry_s for state in lost), default=None)

    def out_of_service(self) -> dict[ExecutorId, str]:
        """Executors out of service, each with its last error."""
        return {executor: state.reason for executor, state in self._states.items() if state.reason is not None}

    def _failed(self, executors: list[ExecutorId], error: str, now: float) -> None:
        for executor in executors:
            state = self._states[executor]
            state.errors += 1
            if state.errors < _ERRORS:
                continue
            was_well, state.reason = state.reason is None, error
            # All of the pool, so that the last one that goes does not let those try at once that went before it.
            for other in self._states.values():
                if other.pool == state.pool:
                    other.retry_s = now + _RETRY_S
            if was_well:
                self._log.error("executor_out_of_service", executor=executor, error=error)
                self._give_up(state.pool)

    def _give_up(self, pool: PoolId) -> None:
        """Where nobody is left who could use the pool, its experts go elsewhere."""
        if self.is_lost(pool):
            try:
                self._scheduler.set_budget(pool, 0)
            except RefusedError as refused:
                self._log.error("experts_cannot_move", device=pool, reason=refused.reason)
