"""What control asks of the scheduler: who is where, who waits, and an operator's wishes. Drive thread only."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from daemon.control import ControlError
from daemon.policy.operate import RefusedError
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolId
from daemon.policy.scheduler import Scheduler
from daemon.policy.snapshot import Snapshot
from experts.spec import ExpertId, ExpertSpec


class Desk:
    """`handlers` by kind of request: fields in, the answer's fields out. ControlError where it cannot be done."""

    def __init__(self, scheduler: Scheduler, catalog: Callable[[], Mapping[ExpertId, ExpertSpec]]) -> None:
        self._scheduler = scheduler
        self._catalog = catalog
        self.handlers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "experts": self._experts,
            "queues": self._queues,
            "pin": self._pin,
            "unpin": self._unpin,
            "unload": self._unload,
            "limits": self._limits,
        }

    def answer(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        handler = self.handlers.get(kind)
        if handler is None:
            raise ControlError("bad_field", f"type: {kind!r} is not one of {', '.join(self.handlers)}")
        try:
            return handler(fields)
        except RefusedError as error:
            raise ControlError(error.code, error.reason) from error

    def _experts(self, _fields: Mapping[str, Any]) -> dict[str, Any]:
        now = self._scheduler.snapshot()
        listed = [
            {
                "expert": expert,
                "version": spec.version,
                "architecture": spec.architecture,
                "task": spec.task,
                "bytes": spec.weights_bytes,
                "usage": self._scheduler.usage(expert),
                "resident": [pool.pool for pool in now.pools if expert in pool.resident],
                "loading": [pool.pool for pool in now.pools if expert in pool.loading],
                "pinned": [pool.pool for pool in now.pools if expert in pool.pinned],
                "queued": now.queued.get(expert, 0),
                "failed": now.failed.get(expert),
            }
            for expert, spec in self._catalog().items()
        ]
        return {"experts": listed}

    def _queues(self, _fields: Mapping[str, Any]) -> dict[str, Any]:
        now = self._scheduler.snapshot()
        queues = [
            {
                "expert": expert,
                "queued": count,
                "resident": [pool.pool for pool in now.pools if expert in pool.resident],
                "loading": [pool.pool for pool in now.pools if expert in pool.loading],
            }
            for expert, count in sorted(now.queued.items(), key=lambda item: (-item[1], item[0]))
        ]
        running = [{"executor": executor, "expert": expert} for executor, expert in now.running.items()]
        return {"queues": queues, "running": running}

    def _pin(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        expert, device = _expert_and_device(fields)
        return {"expert": expert, "device": self._scheduler.pin(expert, device)}

    def _unpin(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        expert, device = _expert_and_device(fields)
        self._scheduler.unpin(expert, device)
        return {"expert": expert}

    def _unload(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        expert, device = _expert_and_device(fields)
        self._scheduler.unload(expert, device)
        return {"expert": expert}

    def _limits(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """`expert_memory`: bytes by device; all are changed, or none."""
        wanted = fields.get("expert_memory") or {}
        if not isinstance(wanted, dict) or any(type(size) is not int or size <= 0 for size in wanted.values()):
            raise ControlError("bad_field", 'expert_memory: expected bytes by device, such as {"cpu": 250000000}')
        before = self._scheduler.budgets()
        try:
            for device, budget_bytes in wanted.items():
                self._scheduler.set_budget(PoolId(device), budget_bytes)
        except RefusedError:
            for device in wanted:
                if device in before:
                    self._scheduler.set_budget(PoolId(device), before[PoolId(device)])
            raise
        return {"expert_memory": dict(self._scheduler.budgets())}


def executor_rows(
    executors: Iterable[ExecutorFacts], now: Snapshot, busy_shares: Mapping[ExecutorId, float]
) -> list[dict[str, Any]]:
    """`executors` of control's `status`: `queued` is what waits for the experts in an executor's pool."""
    pools = {pool.pool: pool for pool in now.pools}
    rows: list[dict[str, Any]] = []
    for facts in executors:
        pool = pools.get(facts.pool)  # None where the policy does not use this device
        resident = () if pool is None else pool.resident
        rows.append(
            {
                "name": facts.executor,
                "device": facts.pool,
                "resident": list(resident),
                "used_bytes": 0 if pool is None else pool.used_bytes,
                "budget_bytes": 0 if pool is None else pool.budget_bytes,
                "queued": sum(now.queued.get(expert, 0) for expert in resident),
                "busy_share": round(busy_shares[facts.executor], 4),
            }
        )
    return rows


def _expert_and_device(fields: Mapping[str, Any]) -> tuple[ExpertId, PoolId | None]:
    expert, device = fields.get("expert"), fields.get("device")
    if not isinstance(expert, str):
        raise ControlError("bad_field", "expert: expected the name of an expert of the catalog")
    if device is not None and not isinstance(device, str):
        raise ControlError("bad_field", "device: expected the name of a device, such as cpu or cuda:0")
    return ExpertId(expert), None if device is None else PoolId(device)
