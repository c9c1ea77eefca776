"""Share work between unequal processors, and tell if the disk or the processors are the bottleneck (`coserve-plus`).

Beside a GPU a CPU is slow but free: it should always have work, and never be the last one that images wait for.
"""

from collections.abc import Sequence

from daemon.policy.late.groups import Group, Groups
from daemon.policy.request import ExecutorFacts, PoolId
from daemon.policy.residency import Residency
from experts.spec import ExpertId

#: A group of more than this many full CPU batches is worth a place on a GPU although the CPU has its expert.
TAKEOVER_BATCHES = 2
#: Weight of the newest batch.
_NEWEST = 0.05


class Pace:
    """A running mean of seconds per image and executor; executors of one device slow each other, which this sees."""

    def __init__(self, executors: Sequence[ExecutorFacts]) -> None:
        self._executors: dict[PoolId, int] = {}
        for facts in executors:
            self._executors[facts.pool] = self._executors.get(facts.pool, 0) + 1
        self._image_s: dict[PoolId, float] = {}

    def ran(self, pool: PoolId, images: int, seconds: float) -> None:
        each_s = seconds / max(1, images)
        before = self._image_s.get(pool, each_s)
        self._image_s[pool] = before + _NEWEST * (each_s - before)

    def images_per_s(self) -> float:
        """Rate of all pools if busy; 0 before the first batch has ended."""
        return sum(self._executors[pool] / each_s for pool, each_s in self._image_s.items() if each_s > 0.0)


class Balance:
    """Comparison of backlogs, in the performance matrix's seconds; without `balances` they do not count."""

    def __init__(self, residency: Residency, groups: Groups, pace: Pace, *, balances: bool) -> None:
        self._balances = balances
        self.has_gpu = balances and residency.has_gpu
        self._residency = residency
        self._groups = groups
        self._pace = pace
        self._gpu = next((facts.device for facts in residency.pools.values() if facts.processor == "gpu"), None)
        cpus = [facts for facts in residency.pools.values() if facts.processor == "cpu"]
        self._cpu = cpus[0].device if cpus else None
        # PCs are taken as equal, so each kind of device gets the same share of its backlog.
        self._gpu_count = len({facts.device for facts in residency.pools.values() if facts.processor == "gpu"})
        self._cpu_count = len({facts.device for facts in cpus})
        self.takeover = TAKEOVER_BATCHES * max((facts.max_batch for facts in cpus), default=0)

    def disk_binds(self) -> bool:
        """True if reading missing experts takes longer than the queued work: then memory must be freed early."""
        images_per_s = self._pace.images_per_s()
        return images_per_s > 0.0 and self._groups.absent.read_s * images_per_s > self._groups.queued

    def pays(self, pool: PoolId, group: Group) -> bool:
        """Return True if a CPU should run a group that a GPU has too: only if the GPU would come to it later."""
        is_gpu = self._residency.pools[pool].processor == "gpu"
        if not self._balances or self._gpu is None or is_gpu or not group.on_gpu:
            return True
        images = min(len(group.requests), self._residency.max_batch(pool, group.expert))
        return self._gpu_backlog_s(group.expert) > self._batch_s(pool, group.expert, images)

    def outgrown(self, group: Group) -> bool:
        """Return True if a group that only the CPU has should go to a GPU: the CPU needs longer than the GPU queue."""
        if self._gpu is None or self._cpu is None or len(group.requests) <= self.takeover:
            return False
        if not self._balances:
            return True
        image_s = self._residency.costs(self._cpu, group.expert).k_s
        return self._groups.cpu_queued / self._cpu_count * image_s > self._gpu_backlog_s(group.expert)

    def to_help(self, pool: PoolId) -> ExpertId | None:
        """Return the largest group that only GPUs have, if an idle CPU would finish a batch of it before they begin."""
        groups, residency = self._groups, self._residency
        if not self._balances:
            return None
        candidates = (
            home.group
            for shelf in groups.of_host(groups.shelves[pool].host)
            if shelf.is_gpu
            for home in shelf.ready.values()
            if not home.group.on_cpu and residency.takes(pool, home.group.expert)
        )
        group = max(candidates, key=lambda group: (len(group.requests), [-each for each in group.age()]), default=None)
        largest = None if group is None else group.expert
        if largest is None or self._gpu is None or len(groups[largest].requests) <= self.takeover:
            return None
        read_s = residency.costs(residency.pools[pool].device, largest).disk_s
        batch_s = self._batch_s(pool, largest, residency.max_batch(pool, largest))
        return largest if self._gpu_backlog_s(largest) > read_s + batch_s else None

    def to_share(self, pool: PoolId) -> ExpertId | None:
        """Return the expert of the largest group on the PC that is furthest behind, if `pool` computes it sooner."""
        groups, residency, own = self._groups, self._residency, self._groups.shelves[pool]
        others = [shelf for shelf in groups.shelves.values() if shelf.host != own.host and shelf.is_gpu == own.is_gpu]
        behind, most = None, 0
        for shelf in others:
            images = sum(len(home.group.requests) for home in shelf.ready.values())
            if images > most:
                behind, most = shelf, images
        if not self._balances or behind is None:
            return None
        candidates = [
            home.group
            for home in behind.ready.values()
            if home.group.expert not in own.residents and residency.takes(pool, home.group.expert)
        ]
        group = max(candidates, key=lambda group: (len(group.requests), group.expert), default=None)
        if group is None or residency.is_coming(group.expert):
            return None
        row = residency.costs(residency.pools[pool].device, group.expert)
        return group.expert if most * row.k_s > row.disk_s + self._batch_s(pool, group.expert, 1) else None

    def _batch_s(self, pool: PoolId, expert: ExpertId, images: int) -> float:
        row = self._residency.costs(self._residency.pools[pool].device, expert)
        return row.k_s * images + row.b_s

    def _gpu_backlog_s(self, expert: ExpertId) -> float:
        """Return the seconds of work that wait for GPUs, as if it all were of this expert's architecture."""
        if self._gpu is None:
            return 0.0
        return self._groups.gpu_queued / self._gpu_count * self._residency.costs(self._gpu, expert).k_s
