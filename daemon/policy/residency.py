"""The state behind every decision: facts, one ledger per pool, leaving experts, and failed loads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from daemon.policy.matrix import Matrix, Performance
from daemon.policy.request import ExecutorFacts, ExpertFacts, PoolFacts, PoolId, Processor
from experts.ledger import Ledger
from experts.spec import ArchitectureId, ExpertId, name_of

#: A share of a request, so that predicted demand is whole numbers and returns to exactly zero.
SHARE_UNITS = 1 << 20


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why an expert could not be loaded, and the time of the next attempt."""

    reason: str
    retry_s: float


class Residency:
    """Facts and residency. Only the scheduler changes it; the parts of a policy read it."""

    def __init__(
        self,
        experts: Iterable[ExpertFacts],
        pools: Sequence[PoolFacts],
        executors: Sequence[ExecutorFacts],
        matrix: Matrix,
        *,
        across_devices: bool = True,
    ) -> None:
        """`across_devices`: a GPU copies experts from the CPU's pool; else the RAM tier is its only host memory."""
        self.matrix = matrix
        self.pools = {facts.pool: facts for facts in pools}
        self.executors = {facts.executor: facts for facts in executors}
        self.ledgers = {facts.pool: Ledger(facts.pool, facts.budget_bytes) for facts in pools}
        #: Budgets asked for; a ledger follows as soon as what is in use allows it.
        self.targets_bytes = {facts.pool: facts.budget_bytes for facts in pools}
        #: Residents that run no more batches: unloaded as soon as they are idle (old weights, an operator's request).
        self.leaving: dict[PoolId, dict[ExpertId, None]] = {facts.pool: {} for facts in pools}
        #: Residents that start no batch now, because a load that may not wait longer needs their bytes.
        self.draining: dict[PoolId, dict[ExpertId, None]] = {facts.pool: {} for facts in pools}
        #: Loads under way into each pool that copy from host memory; the others read from disk.
        self.copying = {facts.pool: 0 for facts in pools}
        #: And those that copy out of it: what is copied stays resident until the load has ended.
        self.copied_from = {facts.pool: 0 for facts in pools}
        self.failures: dict[ExpertId, Failure] = {}
        #: Experts whose last load failed while another pool was loading them too.
        self.suspects: dict[ExpertId, None] = {}
        #: Loads that a pool is not asked for before that second: they failed there, which says nothing of other pools.
        self._refused_s: dict[tuple[PoolId, ExpertId], float] = {}
        #: Loads that hang, with their bytes: a half-written slot cannot be filled again.
        self.stuck: dict[tuple[PoolId, ExpertId], int] = {}
        #: Count of changes of budgets, pins and refusals: each may change where an expert fits.
        self.room_changes = 0
        #: The PCs that have read each expert since the start, and so have it on their disks.
        self.readers: dict[ExpertId, dict[str, None]] = {}
        self.has_gpu = any(facts.processor == "gpu" for facts in pools)
        host = ("ram", "cpu") if across_devices else ("ram",)
        #: Pools whose residents can be copied to a GPU, and those of GPUs, from which the RAM tier keeps what leaves.
        self._sources = tuple(facts.pool for kind in host for facts in pools if facts.processor == kind)
        self._gpus = tuple(facts.pool for facts in pools if facts.processor == "gpu")
        self._batch_limits: dict[tuple[PoolId, ArchitectureId], int] = {}
        self._usable: dict[ExpertId, bool] = {}
        self.experts: dict[ExpertId, ExpertFacts] = {}
        self.then_units: dict[ExpertId, tuple[tuple[ExpertId, int], ...]] = {}
        self.set_facts(experts)

    def set_facts(self, experts: Iterable[ExpertFacts]) -> None:
        self.experts = {facts.expert: facts for facts in experts}
        self.readers = {expert: hosts for expert, hosts in self.readers.items() if expert in self.experts}
        self.suspects.clear()
        self._refused_s.clear()
        self._usable.clear()
        self.least_bytes = min((facts.weights_bytes for facts in self.experts.values()), default=0)
        self.then_units = {
            facts.expert: tuple(
                (expert, round(share * SHARE_UNITS)) for expert, share in facts.then if expert in self.experts
            )
            for facts in self.experts.values()
        }

    def room_changed(self) -> None:
        """Note a change of pins, budgets or refusals: experts may fit other pools than before."""
        self._usable.clear()
        self.room_changes += 1

    def homes(self, expert: ExpertId) -> tuple[PoolId, ...]:
        """Return the pools where a batch of `expert` may start."""
        return tuple(
            pool for pool, facts in self.pools.items() if facts.processor != "ram" and self.can_run(pool, expert)
        )

    def source_for(self, pool: PoolId, expert: ExpertId) -> PoolId | None:
        """Return the pool that `expert` can be copied from into `pool`; None: it comes from disk."""
        processor, facts = self.pools[pool].processor, self.experts.get(expert)
        if processor == "cpu" or facts is None:
            return None
        host = self.pools[pool].host
        for source in self._sources if processor == "gpu" else self._gpus:
            if self.pools[source].host == host and self.can_run(source, expert):
                gpu = pool if processor == "gpu" else source
                row = self.matrix.of(self.pools[gpu].device, facts.architecture)
                return source if row.ram_s is not None else None
        return None

    def is_coming(self, expert: ExpertId, processor: str | None = None) -> bool:
        """Return True if `expert` is being loaded into a pool (of `processor`, if given)."""
        return any(
            ledger.is_loading(expert) and expert not in self.leaving[pool]
            for pool, ledger in self.ledgers.items()
            if processor is None or self.pools[pool].processor == processor
        )

    def can_run(self, pool: PoolId, expert: ExpertId) -> bool:
        return self.ledgers[pool].is_ready(expert) and expert not in self.leaving[pool]

    def has_failed(self, expert: ExpertId, now: float) -> bool:
        failure = self.failures.get(expert)
        return failure is not None and now < failure.retry_s

    def forget_reader(self, host: str, experts: Iterable[ExpertId]) -> None:
        """Note that `host` cannot read `experts` any more, so that other PCs may."""
        for expert in experts:
            self.readers.get(expert, {}).pop(host, None)

    def refuse(self, pool: PoolId, expert: ExpertId, retry_s: float) -> None:
        """Do not ask `pool` for `expert` before `retry_s`: it is to be read elsewhere until then."""
        self._refused_s[pool, expert] = retry_s
        self.room_changed()

    def forgive(self, now: float) -> None:
        if not self._refused_s:
            return
        due = [key for key, retry_s in self._refused_s.items() if retry_s <= now]
        for pool, expert in due:
            self.unrefuse(pool, expert)

    def unrefuse(self, pool: PoolId, expert: ExpertId) -> None:
        if self._refused_s.pop((pool, expert), None) is not None:
            self.room_changed()

    def next_forgiven_s(self) -> float | None:
        return min(self._refused_s.values()) if self._refused_s else None

    def is_refused(self, pool: PoolId, expert: ExpertId) -> bool:
        return (pool, expert) in self._refused_s or (pool, expert) in self.stuck

    def takes(self, pool: PoolId, expert: ExpertId) -> bool:
        """Return True if `pool` may be asked to load `expert` now: not while its budget shrinks."""
        return self.may_take(pool, expert) and self.targets_bytes[pool] >= self.ledgers[pool].budget_bytes

    def may_take(self, pool: PoolId, expert: ExpertId) -> bool:
        """Return True if `pool` may be asked to load `expert`, perhaps after its budget has shrunk."""
        return not self.is_refused(pool, expert) and self.fits(pool, expert)

    def is_taken(self, expert: ExpertId, *processors: Processor) -> bool:
        """Return True if any pool of `processors` may be asked to load `expert`, perhaps after it has shrunk."""
        return any(self.may_take(pool, expert) for pool, facts in self.pools.items() if facts.processor in processors)

    def room_bytes(self, pool: PoolId, expert: ExpertId) -> int:
        """Return the bytes that `expert` could ever have in `pool`: the budget less the pinned bytes of others."""
        pinned = self.ledgers[pool].pinned
        if not pinned:
            return self.targets_bytes[pool]
        return self.targets_bytes[pool] - sum(self.bytes_of(each) for each in pinned if each != expert)

    def fits(self, pool: PoolId, expert: ExpertId) -> bool:
        return self.bytes_of(expert) <= self.room_bytes(pool, expert)

    def is_usable(self, expert: ExpertId) -> bool:
        """Return True if `expert` is in the catalog, fits somewhere and has not failed."""
        return self._usable.get(expert, False) and expert not in self.failures

    def why_never(self, expert: ExpertId) -> str | None:
        """Return why `expert` can be loaded into no pool; None if it can be loaded."""
        usable = self._usable.get(expert)
        pools = [pool for pool, facts in self.pools.items() if facts.processor != "ram"] if not usable else []
        if usable is None:
            usable = self._usable[expert] = any(self.fits(pool, expert) for pool in pools)
        if usable or any(self.can_run(pool, expert) for pool in pools):
            return None
        room_bytes = max((self.room_bytes(pool, expert) for pool in pools), default=0)
        return (
            f"expert {name_of(expert)} needs {self.bytes_of(expert)} bytes and the largest pool has room for"
            f" {room_bytes}: raise a device's expert_memory, or unpin experts"
        )

    def bytes_of(self, expert: ExpertId) -> int:
        facts = self.experts.get(expert)
        return 0 if facts is None else facts.weights_bytes

    def usage(self, expert: ExpertId) -> float:
        facts = self.experts.get(expert)
        return 0.0 if facts is None else facts.usage

    def costs(self, device: str, expert: ExpertId) -> Performance:
        return self.matrix.of(device, self.experts[expert].architecture)

    def max_batch(self, pool: PoolId, expert: ExpertId) -> int:
        """Return the largest batch that pool, profile and activation memory allow (CoServe §4.2).

        It is less after a batch of this architecture ran out of memory there.
        """
        facts = self.experts.get(expert)
        if facts is None:
            return self.pools[pool].max_batch
        limit = self._batch_limits.get((pool, facts.architecture))
        if limit is None:
            limit = self._batch_limits[pool, facts.architecture] = self._profiled_batch(pool, facts.architecture)
        return limit

    def limit_batch(self, pool: PoolId, expert: ExpertId, limit: int) -> None:
        facts = self.experts.get(expert)
        if facts is not None:
            self._batch_limits[pool, facts.architecture] = max(1, min(limit, self.max_batch(pool, expert)))

    def _profiled_batch(self, pool: PoolId, architecture: ArchitectureId) -> int:
        facts = self.pools[pool]
        row = self.matrix.of(facts.device, architecture)
        bound = min(facts.max_batch, row.max_batch)
        if facts.activation_bytes is not None and row.activation_bytes > 0:
            bound = min(bound, facts.activation_bytes // row.activation_bytes)
        return max(1, bound)
