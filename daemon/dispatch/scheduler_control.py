"""Control requests about the scheduler: residents, queues, pins, memory limits. Drive thread only."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from daemon.dispatch.chains import Chains
from daemon.dispatch.watch import ExecutorHealth
from daemon.policy.actions import PoolSnapshot, Snapshot
from daemon.policy.operate import OperationRefusedError, unknown_device
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolId, device_of
from daemon.policy.scheduler import Scheduler
from daemon.units import MAX_BYTES
from daemon.wire.control import ControlError
from experts.spec import ExpertId, ExpertSpec, name_of


class SchedulerControl:
    """`handlers` maps each kind of request to a function from its fields to the answer's. Raises ControlError."""

    def __init__(
        self, scheduler: Scheduler, chains: Chains, health: ExecutorHealth, usage: Callable[[], Mapping[str, float]]
    ) -> None:
        """`usage` returns the probability that an image uses an expert, by name."""
        self._usage = usage
        self._scheduler = scheduler
        self._chains = chains
        self._health = health
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
        except OperationRefusedError as error:
            spec = self._chains.catalog.get(ExpertId(str(fields.get("expert"))))
            head = f"{spec.name} is a head of {spec.backbone.name}: " if spec and spec.backbone else ""
            raise ControlError(error.code, f"{head}{error.reason}") from error

    def _experts(self, _fields: Mapping[str, Any]) -> dict[str, Any]:
        """For a head, residency, pins and queue are its backbone's."""
        now, usage = self._scheduler.snapshot(), self._usage()
        rows = [
            {
                "expert": name,
                "version": spec.version,
                "settings": spec.settings_digest,
                "architecture": spec.architecture,
                "task": spec.task,
                "bytes": spec.weights_bytes,
                "usage": usage.get(name, 0.0),
                **_places(now, expert),
                "pinned": [pool.pool for pool in now.pools if expert in pool.pinned],
                "queued": now.queued.get(expert, 0),
                "failed": now.failed.get(expert),
                **({} if spec.backbone is None else {"backbone": spec.backbone.name}),
            }
            for name, spec in self._chains.catalog.items()
            for expert in (self._chains.resident_of(spec).expert,)
        ]
        return {"experts": rows}

    def _queues(self, _fields: Mapping[str, Any]) -> dict[str, Any]:
        now = self._scheduler.snapshot()
        queues = [
            {"expert": name_of(expert), "queued": count, **_places(now, expert)}
            for expert, count in sorted(now.queued.items(), key=lambda item: (-item[1], item[0]))
        ]
        running = [{"executor": executor, "expert": name_of(expert)} for executor, expert in now.running.items()]
        return {"queues": queues, "running": running}

    def _pin(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        expert, device = self._expert_and_device(fields)
        return {"expert": name_of(expert), "device": device_of(self._scheduler.pin(expert, device))}

    def _unpin(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        expert, device = self._expert_and_device(fields)
        self._scheduler.unpin(expert, device)
        return {"expert": name_of(expert)}

    def _unload(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        expert, device = self._expert_and_device(fields)
        self._scheduler.unload(expert, device)
        return {"expert": name_of(expert)}

    def _limits(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Set `expert_memory`, bytes by device, divided equally over its pools; all are changed, or none."""
        wanted = fields.get("expert_memory") or {}
        if not isinstance(wanted, dict) or not all(
            type(size) is int and 0 < size <= MAX_BYTES for size in wanted.values()
        ):
            raise ControlError("bad_field", 'expert_memory: expected bytes by device, such as {"cpu": 250000000}')
        before = self._scheduler.budgets()
        budgets: dict[PoolId, int] = {}
        for device, size_bytes in wanted.items():
            pools = self._pools(device)
            lost = [pool for pool in pools if self._health.is_lost(pool)]
            if lost:
                raise ControlError("out_of_service", _out_of_service(lost[0], is_empty=before[lost[0]] == 0))
            budgets.update((pool, size_bytes // len(pools)) for pool in pools)
        # Growing pools first: an expert that must leave one device may then fit another.
        order = sorted(budgets, key=lambda pool: before[pool] - budgets[pool])
        try:
            for pool in order:
                self._scheduler.set_budget(pool, budgets[pool])
        except OperationRefusedError:
            for pool in order:
                self._scheduler.set_budget(pool, before[pool])
            raise
        now: dict[str, int] = {}
        for pool, budget_bytes in self._scheduler.budgets().items():
            now[device_of(pool)] = now.get(device_of(pool), 0) + budget_bytes
        return {"expert_memory": now}

    def _expert_and_device(self, fields: Mapping[str, Any]) -> tuple[ExpertId, PoolId | None]:
        expert, device = fields.get("expert"), fields.get("device")
        if not isinstance(expert, str):
            raise ControlError("bad_field", "expert: expected the name of an expert of the catalog")
        if device is not None and not isinstance(device, str):
            raise ControlError("bad_field", "device: expected the name of a device, such as cpu or cuda:0")
        spec = self._chains.catalog.get(ExpertId(expert))
        place = None if device is None else PoolId(device)
        return ExpertId(expert) if spec is None else self._chains.resident_of(spec).expert, place

    def _pools(self, device: str) -> tuple[PoolId, ...]:
        pools = tuple(pool for pool in self._scheduler.pools if device in (pool, device_of(pool)))
        if not pools:
            raise ControlError("unknown_device", unknown_device(self._scheduler.pools, device))
        return pools


def _places(now: Snapshot, expert: ExpertId) -> dict[str, list[PoolId]]:
    return {
        "resident": [pool.pool for pool in now.pools if expert in pool.resident],
        "loading": [pool.pool for pool in now.pools if expert in pool.loading],
    }


def _out_of_service(pool: PoolId, *, is_empty: bool) -> str:
    if is_empty:
        how = "restart the daemon, or for another PC its worker (one that was only out of reach returns by itself)"
        return f"{pool} is out of service: {how}"
    return f"{pool} is out of service and retried automatically: the other devices cannot hold all of its experts"


def executor_rows(
    executors: Iterable[ExecutorFacts],
    now: Snapshot,
    busy_shares: Mapping[ExecutorId, float],
    out_of_service: Mapping[ExecutorId, str],
) -> list[dict[str, Any]]:
    """Return `executors` of control's `status`. Executors that share a pool show the same experts and bytes."""
    pools = {pool.pool: pool for pool in now.pools}
    rows: list[dict[str, Any]] = []
    for facts in executors:
        # Empty if the policy does not use this device.
        pool = pools.get(facts.pool, PoolSnapshot(facts.pool, (), (), (), 0, 0))
        row = {
            "name": facts.executor,
            "device": device_of(facts.pool),
            "pool": facts.pool,
            "resident": [*map(name_of, pool.resident)],
            "used_bytes": pool.used_bytes,
            "budget_bytes": pool.budget_bytes,
            "queued": sum(now.queued.get(expert, 0) for expert in pool.resident),
            "busy_share": round(busy_shares[facts.executor], 4),
        }
        if facts.executor in out_of_service:
            row["out_of_service"] = out_of_service[facts.executor]
        rows.append(row)
    return rows


def memory_rows(
    executors: Iterable[ExecutorFacts], now: Snapshot, resident: Mapping[ExpertId, ExpertSpec]
) -> list[dict[str, Any]]:
    """Return `pools` of control's `memory`. A load that hangs holds what `used_bytes` has beyond the experts."""
    executors = tuple(executors)
    rows: list[dict[str, Any]] = []
    for pool in now.pools:
        in_use = {now.running.get(facts.executor) for facts in executors if facts.pool == pool.pool}
        experts = [
            {
                "expert": name_of(expert),
                "bytes": resident[expert].weights_bytes if expert in resident else 0,
                "is_loading": expert in pool.loading,
                "is_pinned": expert in pool.pinned,
                "is_in_use": expert in in_use,
            }
            for expert in (*pool.resident, *pool.loading)
        ]
        row = {"pool": pool.pool, "device": device_of(pool.pool), "experts": experts}
        rows.append({**row, "used_bytes": pool.used_bytes, "budget_bytes": pool.budget_bytes})
    return rows


def pool_rows(executors: Iterable[ExecutorFacts], now: Snapshot) -> list[dict[str, Any]]:
    """Return `pools` of control's `status` with the executors that share each (none: host memory beside a GPU)."""
    executors = tuple(executors)
    return [
        {
            "pool": pool.pool,
            "device": device_of(pool.pool),
            "executors": [facts.executor for facts in executors if facts.pool == pool.pool],
            "experts": len(pool.resident),
            "used_bytes": pool.used_bytes,
            "budget_bytes": pool.budget_bytes,
            "queued": sum(now.queued.get(expert, 0) for expert in pool.resident),
        }
        for pool in now.pools
    ]


def queue_lengths(now: Snapshot) -> tuple[dict[str, int], int]:
    by_device = dict.fromkeys((device_of(pool.pool) for pool in now.pools), 0)
    homes: dict[ExpertId, dict[str, None]] = {}
    for pool in now.pools:
        for expert in pool.resident:
            homes.setdefault(expert, {})[device_of(pool.pool)] = None
    for expert, count in now.queued.items():
        for device in homes.get(expert, ()):
            by_device[device] += count
    return by_device, sum(count for expert, count in now.queued.items() if expert not in homes)
