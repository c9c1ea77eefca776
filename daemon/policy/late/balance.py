"""Share work between unequal processors, and tell if the disk or the processors are the bottleneck (`coserve-plus`).

Beside a GPU a CPU is slow but free: it should always have work, and never be the last one that images wait for.
"""

from daemon.policy.late.groups import Groups
from daemon.policy.late.pace import Pace
from daemon.policy.request import PoolId
from daemon.policy.residency import Residency
from experts.spec import ExpertId

#: A group of more than this many full CPU batches is worth a place on a GPU although the CPU has its expert.
TAKEOVER_BATCHES = 2


class Balance:
    """Comparison of backlogs, in the performance matrix's seconds; without `balances` they do not count."""

    def __init__(self, residency: Residency, groups: Groups, pace: Pace, *, balances: bool) -> None:
        self._balances = balances
        self._residency = residency
        self._groups = groups
        self._pace = pace
        self._gpu = next((facts.device for facts in residency.pools.values() if facts.processor == "gpu"), None)
        cpus = [facts for facts in residency.pools.values() if facts.processor == "cpu"]
        self._cpu = cpus[0].device if cpus else None
        self._takeover = TAKEOVER_BATCHES * max((facts.max_batch for facts in cpus), default=0)

    def disk_binds(self) -> bool:
        """Return True if reading missing experts takes longer than the queued work: then memory must be freed early."""
        images_per_s = self._pace.images_per_s()
        return images_per_s > 0.0 and self._groups.read_s * images_per_s > self._groups.queued

    def pays(self, pool: PoolId, expert: ExpertId) -> bool:
        """Return True if a CPU should run a group that a GPU has too: only if the GPU would come to it later."""
        is_gpu = self._residency.pools[pool].processor == "gpu"
        if not self._balances or self._gpu is None or is_gpu or not self._groups.place(expert).on_gpu:
            return True
        images = min(len(self._groups[expert].requests), self._residency.max_batch(pool, expert))
        return self._gpu_backlog_s(expert) > self._batch_s(pool, expert, images)

    def outgrown(self, expert: ExpertId) -> bool:
        """Return True if a group that only the CPU has should go to a GPU: the CPU needs longer than the GPU queue."""
        if self._gpu is None or self._cpu is None or len(self._groups[expert].requests) <= self._takeover:
            return False
        if not self._balances:
            return True
        row = self._residency.matrix.of(self._cpu, self._residency.experts[expert].architecture)
        return self._groups.cpu_queued * row.k_s > self._gpu_backlog_s(expert)

    def to_help(self, pool: PoolId) -> ExpertId | None:
        """Return the largest group that only GPUs have, if an idle CPU would finish a batch of it before they begin."""
        groups, residency = self._groups, self._residency
        if not self._balances:
            return None
        candidates = (
            expert
            for shelf in groups.shelves.values()
            if shelf.is_gpu
            for expert in shelf.fullest.ordered()
            if not groups.place(expert).on_cpu and residency.takes(pool, expert)
        )
        largest = max(candidates, key=lambda expert: len(groups[expert].requests), default=None)
        if largest is None or self._gpu is None or len(groups[largest].requests) <= self._takeover:
            return None
        read_s = residency.matrix.of(residency.pools[pool].device, residency.experts[largest].architecture).disk_s
        batch_s = self._batch_s(pool, largest, residency.max_batch(pool, largest))
        return largest if self._gpu_backlog_s(largest) > read_s + batch_s else None

    def _batch_s(self, pool: PoolId, expert: ExpertId, images: int) -> float:
        row = self._residency.matrix.of(
            self._residency.pools[pool].device, self._residency.experts[expert].architecture
        )
        return row.k_s * images + row.b_s

    def _gpu_backlog_s(self, expert: ExpertId) -> float:
        """Return the seconds of work that wait for GPUs, as if it all were of this expert's architecture."""
        if self._gpu is None:
            return 0.0
        return (
            self._groups.gpu_queued
            * self._residency.matrix.of(self._gpu, self._residency.experts[expert].architecture).k_s
        )
