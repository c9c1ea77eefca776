"""The paper's executors (CoServe §4.2): memory for each, queues of groups, predicted costs, who gets a request."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from daemon.policy.presets import Preset
from daemon.policy.request import RAM, ExecutorFacts, ExecutorId, PoolFacts, PoolId, Request, RequestId
from daemon.policy.residency import Residency
from experts.ledger import Ledger
from experts.spec import ExpertId

#: Costs are whole nanoseconds: totals never drift.
NS_PER_S = 1_000_000_000


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


@dataclass(slots=True, eq=False)
class QueuedGroup:
    """Consecutive requests of one expert. `overhead_ns`: predicted cost beside K, until the first batch has run."""

    expert: ExpertId
    queue: "Queue"
    cost: Cost
    overhead_ns: int
    requests: OrderedDict[RequestId, Request] = field(default_factory=OrderedDict[RequestId, Request])


@dataclass(slots=True, eq=False)
class Queue:
    """Requests that wait for one executor, and their predicted work: waiting groups and the running batch."""

    executor: ExecutorId
    pool: PoolId
    ledger: Ledger
    groups: OrderedDict[QueuedGroup, None] = field(default_factory=OrderedDict[QueuedGroup, None])
    #: The group that a request of the same expert may join.
    newest: dict[ExpertId, QueuedGroup] = field(default_factory=dict[ExpertId, QueuedGroup])
    work_ns: int = 0
    running: ExpertId | None = None
    running_ns: int = 0

    @property
    def head(self) -> QueuedGroup | None:
        return next(iter(self.groups), None)

    def missing(self) -> ExpertId | None:
        if self.running is not None or (head := self.head) is None or self.ledger.holds(head.expert):
            return None
        return head.expert

    def group_for(self, expert: ExpertId, arrange: Literal["last", "behind its group"]) -> QueuedGroup | None:
        """Return the group that a new request of `expert` joins; None: it opens one at the end.

        Behind its group it is CoServe's request arranging (§4.2), else requests stay in the order of arrival.
        """
        if arrange == "behind its group":
            return self.newest.get(expert)
        last = next(reversed(self.groups), None)
        return last if last is not None and last.expert == expert else None

    def open(self, group: QueuedGroup, *, at_front: bool) -> None:
        self.groups[group] = None
        if at_front:
            self.groups.move_to_end(group, last=False)
            self.newest.setdefault(group.expert, group)
        else:
            self.newest[group.expert] = group
        self.work_ns += group.overhead_ns

    def close(self, group: QueuedGroup) -> None:
        del self.groups[group]
        if self.newest.get(group.expert) is group:
            del self.newest[group.expert]
        self.work_ns -= group.overhead_ns


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
