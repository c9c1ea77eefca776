"""Predict the cost of a request at an executor (CoServe §4.2), in whole nanoseconds: totals never drift."""

from dataclasses import dataclass

from daemon.policy.request import RAM, PoolId
from daemon.policy.residency import Residency
from experts.spec import ExpertId

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """One expert in one pool: a batch of n takes `each_ns` · n + `start_ns` (K and B); a load, by tier.

    `ram_ns` is None if no host copy can serve the pool.
    """

    each_ns: int
    start_ns: int
    disk_ns: int
    ram_ns: int | None


class Costs:
    """Costs by pool and expert, out of the performance matrix; computed once until `forget`."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._has_ram = RAM in residency.pools
        self._known: dict[tuple[PoolId, ExpertId], Cost] = {}

    def of(self, pool: PoolId, expert: ExpertId) -> Cost:
        cost = self._known.get((pool, expert))
        if cost is None:
            cost = self._known[pool, expert] = self._compute(pool, expert)
        return cost

    def in_ram(self, expert: ExpertId) -> bool:
        """Return True if the RAM tier has `expert`; the pools of other executors do not count."""
        return self._has_ram and self._residency.can_run(RAM, expert)

    def load_ns(self, cost: Cost, expert: ExpertId) -> int:
        return cost.ram_ns if cost.ram_ns is not None and self.in_ram(expert) else cost.disk_ns

    def forget(self) -> None:
        self._known.clear()

    def _compute(self, pool: PoolId, expert: ExpertId) -> Cost:
        facts = self._residency.experts.get(expert)
        if facts is None:
            return Cost(0, 0, 0, None)
        facts_of_pool = self._residency.pools[pool]
        row = self._residency.matrix.of(facts_of_pool.device, facts.architecture)
        has_copies = facts_of_pool.processor == "gpu" and not facts_of_pool.host and row.ram_s is not None
        return Cost(
            each_ns=round(row.k_s * NS_PER_S),
            start_ns=round(row.b_s * NS_PER_S),
            disk_ns=round(row.disk_s * NS_PER_S),
            ram_ns=round(row.ram_s * NS_PER_S) if has_copies and row.ram_s is not None else None,
        )
