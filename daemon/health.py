"""Which executors can be trusted with a batch: after repeated errors of its device one is taken out of service."""

from collections.abc import Iterable
from dataclasses import dataclass

from daemon.policy.request import ExecutorFacts, ExecutorId, PoolId

#: Device errors one after the other that take an executor out of service: one may be an accident, a CUDA context
#: that is lost gives nothing else any more.
_ERRORS = 3
#: Where nobody else can serve its experts, it is tried again this often.
_RETRY_S = 30.0


@dataclass(slots=True)
class _State:
    pool: PoolId
    errors: int = 0
    reason: str | None = None
    rests_until_s: float = 0.0


class Health:
    """Executors by the errors of their devices. `now` is seconds on the drive's clock."""

    def __init__(self, executors: Iterable[ExecutorFacts]) -> None:
        self._states = {facts.executor: _State(facts.pool) for facts in executors}

    def well(self, executor: ExecutorId) -> bool:
        """A batch of `executor` was answered: its device works. True: it was out of service, and is back."""
        state = self._states[executor]
        was_out = state.reason is not None
        state.errors, state.reason = 0, None
        return was_out

    def batch_failed(self, executor: ExecutorId, error: str, now: float) -> bool:
        """A batch failed by an error of its device. True: the executor is out of service from now on."""
        state = self._states[executor]
        state.errors += 1
        if state.errors < _ERRORS:
            return False
        was_well = state.reason is None
        state.reason = error
        state.rests_until_s = now + _RETRY_S
        return was_well

    def load_failed(self, pool: PoolId, error: str, now: float) -> list[ExecutorId]:
        """A load failed by an error of the device: the executors that are out of service because of it."""
        mine = [executor for executor, state in self._states.items() if state.pool == pool]
        return [executor for executor in mine if self.batch_failed(executor, error, now)]

    def emptied(self, pool: PoolId) -> None:
        """No expert is left in `pool`: its executors may be asked again, so that what is bound to them moves on."""
        for state in self._states.values():
            if state.pool == pool:
                state.rests_until_s = 0.0

    def is_lost(self, pool: PoolId) -> bool:
        """Whether no executor of `pool` is in service."""
        mine = [state for state in self._states.values() if state.pool == pool]
        return bool(mine) and all(state.reason is not None for state in mine)

    def rests_until_s(self, executor: ExecutorId, now: float) -> float | None:
        """When an executor that is out of service is tried again; None where it may run now."""
        state = self._states[executor]
        return state.rests_until_s if state.reason is not None and now < state.rests_until_s else None

    def out_of_service(self) -> dict[ExecutorId, str]:
        """Executors out of service, each with its last error."""
        return {executor: state.reason for executor, state in self._states.items() if state.reason is not None}
