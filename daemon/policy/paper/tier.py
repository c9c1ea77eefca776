"""The RAM tier under the paper's policies: host memory keeps what leaves a GPU (CoServe §5.1, Samba-CoE's cache).

A miss is read from disk into host memory, then copied to the GPU. Experts evicted from the GPU for it are copied back
first, if host memory has room; host copies of experts that a GPU has are evicted first there. So both memories together
hold nearly as many different experts as fit.
"""

from collections.abc import Iterable, Iterator, Sequence

from daemon.policy.discipline import Want
from daemon.policy.paper.assign import Costs, Queue
from daemon.policy.paper.evict import FirstInFirstOut, LeastRecentlyUsed
from daemon.policy.request import RAM, PoolId
from daemon.policy.residency import Residency
from experts.spec import ExpertId


class RamTier:
    """Host copies; the least recently used leave first. `order` is the order of eviction on a GPU.

    The expert that an idle executor waits for, and those it will evict, stay until its load has begun: with room for
    one expert only, two GPUs would otherwise evict each other's for ever.
    """

    def __init__(self, residency: Residency, queues: Sequence[Queue], order: FirstInFirstOut, costs: Costs) -> None:
        self._residency = residency
        self._costs = costs
        self._gpu_order = order
        self._is_there = RAM in residency.pools
        self._order = LeastRecentlyUsed(residency, [RAM] if self._is_there else [])
        #: The queue that has waited longest for the disk comes first.
        self._served = [queue for queue in queues if self._is_there and residency.pools[queue.pool].processor == "gpu"]
        self._gpus = list(dict.fromkeys(queue.pool for queue in self._served))

    def delays(self, queue: Queue, expert: ExpertId) -> bool:
        """Return True if `queue`'s load of `expert` waits for host memory: for its copy, or to keep evicted experts."""
        if not self._is_there or queue.pool not in self._gpus:
            return False
        return self._must_stage(queue, expert) or any(self._kept(queue, expert))

    def wants(self) -> Iterator[Want]:
        """Yield loads into host memory: experts that leave a GPU, then a read from disk for each waiting executor."""
        missing = [(queue, expert) for queue in self._served if (expert := queue.missing()) is not None]
        holds = self._residency.ledgers[RAM].holds
        for queue, expert in missing:
            for leaving in () if self._must_stage(queue, expert) else self._kept(queue, expert):
                if not holds(leaving):
                    yield Want(leaving, "demand", "any")
        for queue, expert in missing:
            if self._must_stage(queue, expert) and not holds(expert):
                yield Want(expert, "demand", "any")

    def granted(self, expert: ExpertId, pool: PoolId) -> None:
        """Note that a load of `expert` into `pool` has begun: into host memory, or perhaps from it."""
        if pool == RAM:
            # True sorts after False, and the sort is stable: queues that wait for `expert` go behind the others.
            self._served.sort(key=lambda queue: queue.missing() == expert)
        elif self._is_there:
            self._order.used(RAM, expert)

    def residency_changed(self, expert: ExpertId) -> None:
        if not self._is_there:
            return
        self._order.residency_changed(expert)
        if not self._is_on_gpu(expert):
            self._order.used(RAM, expert)

    def victims(self) -> Iterable[ExpertId]:
        """Return the copies of experts that a GPU has, then the others."""
        spared: dict[ExpertId, None] = {}
        for queue in self._served:
            expert = queue.missing()
            if expert is not None:
                spared[expert] = None
                if not self._must_stage(queue, expert):
                    spared.update(dict.fromkeys(self._leaving(queue, expert)))
        evictable = [expert for expert in self._order.victims(RAM) if expert not in spared]
        return sorted(evictable, key=lambda expert: not self._is_on_gpu(expert))

    def _must_stage(self, queue: Queue, expert: ExpertId) -> bool:
        """Return True if `expert` comes from disk, and through host memory."""
        if self._costs.of(queue.pool, expert).ram_ns is None or not self._residency.may_take(RAM, expert):
            return False
        return self._residency.source_for(queue.pool, expert) is None

    def _kept(self, queue: Queue, expert: ExpertId) -> Iterator[ExpertId]:
        """Yield experts that leave the pool of `queue` for `expert` and are not yet in host memory, which has room."""
        residency, ledger = self._residency, self._residency.ledgers[RAM]
        for leaving in self._leaving(queue, expert):
            if (
                not residency.takes(RAM, leaving)
                or ledger.is_ready(leaving)
                or residency.source_for(RAM, leaving) is None
            ):
                continue
            if ledger.is_loading(leaving) or ledger.plan_room(residency.bytes_of(leaving), self.victims()) is not None:
                yield leaving

    def _leaving(self, queue: Queue, expert: ExpertId) -> tuple[ExpertId, ...]:
        need_bytes = self._residency.bytes_of(expert)
        return queue.ledger.plan_room(need_bytes, self._gpu_order.victims(queue.pool), when_idle=True) or ()

    def _is_on_gpu(self, expert: ExpertId) -> bool:
        return any(self._residency.can_run(pool, expert) for pool in self._gpus)
