"""Assign memory to executors, and requests to the queues of executors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from daemon.policy.paper.arrange import Queue, QueuedGroup
from daemon.policy.paper.cost import Costs
from daemon.policy.presets import Preset
from daemon.policy.request import ExecutorFacts, PoolFacts, PoolId
from daemon.policy.residency import Residency
from experts.spec import ExpertId


def partition(
    pools: Sequence[PoolFacts], executors: Sequence[ExecutorFacts], preset: Preset
) -> tuple[tuple[PoolFacts, ...], tuple[ExecutorFacts, ...]]:
    """Return the pools and executors that a preset makes of a machine's devices; a RAM tier stays one pool.

    A GPU's executors come first. Where each executor has its own pool, the device's memory is cut into equal shares and
    a pool is named as its executor is. A machine that was partitioned before stays as it is.
    """
    gpus = {facts.pool for facts in pools if facts.processor == "gpu"}
    ordered = sorted(executors, key=lambda facts: facts.pool not in gpus)
    used = ordered[:1] if preset.single_executor else ordered
    divided: list[PoolFacts] = []
    moved: list[ExecutorFacts] = []
    for facts in pools:
        mine = [executor for executor in used if executor.pool == facts.pool]
        bound = facts.max_batch if preset.batch_bound is None else preset.batch_bound
        if facts.processor == "ram":
            divided.append(facts)
        elif not mine:
            continue
        elif not preset.own_pools or len(mine) == 1:
            divided.append(replace(facts, max_batch=bound))
            moved += mine
        else:
            share_bytes = facts.budget_bytes // len(mine)
            for executor in mine:
                own = PoolId(str(executor.executor))
                divided.append(replace(facts, pool=own, budget_bytes=share_bytes, max_batch=bound))
                moved.append(replace(executor, pool=own))
    moved.sort(key=lambda facts: [each.executor for each in used].index(facts.executor))
    return tuple(divided), tuple(moved)


class Candidate(NamedTuple):
    """One queue that may take an expert's request, and the time that this adds there (CoServe §4.2).

    `queued_ns` if its group waits there already, `resident_ns` if the expert is in the pool, else with a load.
    """

    queue: Queue
    groups: Mapping[ExpertId, QueuedGroup]
    is_resident: Callable[[ExpertId], bool]
    queued_ns: int
    resident_ns: int
    from_ram_ns: int
    from_disk_ns: int


class Candidates:
    """The queues whose pool takes an expert, computed once per expert until `forget`."""

    def __init__(self, residency: Residency, queues: Sequence[Queue], costs: Costs) -> None:
        self._residency = residency
        self._queues = queues
        self._costs = costs
        self._known: dict[ExpertId, tuple[Candidate, ...]] = {}

    def of(self, expert: ExpertId) -> tuple[Candidate, ...]:
        """Return the candidates, never none: if no pool takes the expert now, its requests wait in any queue."""
        candidates = self._known.get(expert)
        if candidates is None:
            fit = [queue for queue in self._queues if self._residency.may_take(queue.pool, expert)]
            candidates = self._known[expert] = tuple(self._candidate(queue, expert) for queue in fit or self._queues)
        return candidates

    def forget(self) -> None:
        self._known.clear()

    def _candidate(self, queue: Queue, expert: ExpertId) -> Candidate:
        cost = self._costs.of(queue.pool, expert)
        first_ns = cost.each_ns + cost.start_ns
        from_disk_ns = first_ns + cost.disk_ns
        from_ram_ns = from_disk_ns if cost.ram_ns is None else first_ns + cost.ram_ns
        return Candidate(queue, queue.newest, queue.ledger.is_ready, cost.each_ns, first_ns, from_ram_ns, from_disk_ns)


class RoundRobin:
    """Assigns each request to the next executor that can have the expert."""

    def __init__(self, candidates: Candidates, queues: Sequence[Queue], _costs: Costs) -> None:
        self._candidates = candidates
        self._queues = queues
        self._next = 0

    def choose(self, expert: ExpertId) -> Queue:
        possible, count = self._candidates.of(expert), len(self._queues)
        for turn in range(self._next, self._next + count):
            queue = self._queues[turn % count]
            if len(possible) == count or any(queue is candidate.queue for candidate in possible):
                self._next = (turn + 1) % count
                return queue
        return possible[0].queue


class LeastMakespan:
    """Assigns to the executor with the least makespan (CoServe §4.2, request assigning).

    Ties go to the executor that adds the least latency, then to the first. The paper's two conditions make a load free:
    the expert is resident, or queued there already.
    """

    def __init__(self, candidates: Candidates, queues: Sequence[Queue], costs: Costs) -> None:
        self._candidates = candidates
        self._queues = queues
        self._costs = costs

    def choose(self, expert: ExpertId) -> Queue:
        makespan_ns = 0
        for queue in self._queues:
            # Not max(): a call for each executor is half of what an arrival costs.
            if queue.work_ns > makespan_ns:  # noqa: PLR1730
                makespan_ns = queue.work_ns
        best, best_ns, best_added_ns = None, 0, 0
        possible, in_ram = self._candidates.of(expert), self._costs.in_ram(expert)
        for queue, groups, is_resident, queued_ns, resident_ns, from_ram_ns, from_disk_ns in possible:
            if expert in groups:
                added_ns = queued_ns
            elif is_resident(expert):
                added_ns = resident_ns
            else:
                added_ns = from_ram_ns if in_ram else from_disk_ns
            finish_ns = queue.work_ns + added_ns
            if finish_ns < makespan_ns:  # noqa: PLR1730
                finish_ns = makespan_ns
            if best is None or finish_ns < best_ns or (finish_ns == best_ns and added_ns < best_added_ns):
                best, best_ns, best_added_ns = queue, finish_ns, added_ns
        return possible[0].queue if best is None else best


ASSIGN: dict[Literal["round robin", "least makespan"], type[RoundRobin] | type[LeastMakespan]] = {
    "round robin": RoundRobin,
    "least makespan": LeastMakespan,
}
