"""The parts of the paper's policies on their own: executors' queues on a residency whose residents a test chooses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from daemon.policy.matrix import Matrix, Performance
from daemon.policy.paper.queues import ExecutorQueues
from daemon.policy.presets import preset
from daemon.policy.request import ExecutorFacts, ExecutorId, ExpertFacts, PoolFacts, PoolId
from daemon.policy.residency import Residency
from experts.spec import ArchitectureId, ExpertId
from tests.daemon.policy.books import check_queues
from tests.daemon.policy.line import a_pool, a_request

K_S, B_S, DISK_S, RAM_S = 0.03, 0.02, 1.0, 0.1


def a_row(device: str, k_s: float = K_S, b_s: float = B_S, max_batch: int = 8, **fields) -> Performance:
    return Performance(device, ArchitectureId("resnet18"), k_s, b_s, max_batch, disk_s=DISK_S, ram_s=RAM_S, **fields)


@dataclass
class Parts:
    """Queues, and the residency under them; tests play the scheduler."""

    residency: Residency
    queues: ExecutorQueues
    number: int = 0

    def add(self, *experts: str) -> list[str]:
        """Queue one request of each; returns the executors that took them."""
        executors: list[str] = []
        for expert in experts:
            before = {name: self.waiting(name) for name in self.residency.executors}
            self.number += 1
            self.queues.add(a_request(self.number, expert))
            executors += [name for name in before if len(self.waiting(name)) > len(before[name])]
            check_queues(self.queues)
        return executors

    def waiting(self, executor: str) -> list[str]:
        queue = self.queues._queues[ExecutorId(executor)]
        return [request.expert for group in queue.groups for request in group.requests.values()]

    def hold(self, pool: str, *experts: str) -> None:
        for name in experts:
            expert, ledger = ExpertId(name), self.residency.ledgers[PoolId(pool)]
            ledger.begin_load(expert, self.residency.bytes_of(expert))
            ledger.finish_load(expert)
            self.queues.residency_changed(expert)

    def drop(self, pool: str, *experts: str) -> None:
        for name in experts:
            self.residency.ledgers[PoolId(pool)].evict(ExpertId(name))
            self.queues.residency_changed(ExpertId(name))

    def take(self, executor: str) -> list[int]:
        batch = self.queues.take(ExecutorId(executor), 0.0)
        if batch:
            self.residency.ledgers[self.residency.executors[ExecutorId(executor)].pool].use(batch[0].expert)
        check_queues(self.queues)
        return [request.request_id for request in batch]

    def run(self, executor: str) -> list[int]:
        """Take the next batch, and end it."""
        head = self.waiting(executor)[0]
        batch = self.take(executor)
        self.end(executor, head)
        return batch

    def end(self, executor: str, expert: str) -> None:
        self.residency.ledgers[self.residency.executors[ExecutorId(executor)].pool].release(ExpertId(expert))
        self.queues.ended(ExecutorId(executor), ExpertId(expert), 1)
        check_queues(self.queues)

    def wants(self, pool: str) -> list[str]:
        return [want.expert for want in self.queues.wants(PoolId(pool), 0.0)]

    def victims(self, pool: str) -> list[str]:
        return list(self.queues.victims(PoolId(pool), "any"))


def some_parts(
    experts: Iterable[ExpertFacts],
    pools: Sequence[PoolFacts] = (),
    policy: str = "coserve",
    matrix: Iterable[Performance] = (),
    residency: type[Residency] = Residency,
) -> Parts:
    """One executor for each pool but the RAM tier, named as the pool is."""
    pools = pools or [a_pool(f"cuda:0/{n}", 1000, 8) for n in range(3)]
    executors = [ExecutorFacts(ExecutorId(pool.pool), pool.pool) for pool in pools if pool.processor != "ram"]
    pool_contents = residency(experts, pools, executors, Matrix(matrix or [a_row("cuda:0"), a_row("cpu")]))
    return Parts(pool_contents, ExecutorQueues(pool_contents, preset(policy)))
