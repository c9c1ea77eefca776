"""Requests bound at their arrival: one queue of groups per executor (the paper's policies and its baselines).

Nothing is loaded before the head of an executor's queue needs it, and not while that executor runs (CoServe §4.1,
figure 7: a switch is part of serving the request).
"""

from collections.abc import Iterable
from typing import Literal

from daemon.policy.discipline import Evict, Want
from daemon.policy.paper.assign import ASSIGN, Candidates, Costs, Queue, QueuedGroup
from daemon.policy.paper.evict import ORDERS
from daemon.policy.paper.tier import RamTier
from daemon.policy.presets import Preset
from daemon.policy.request import RAM, ExecutorId, PoolId, Request, RequestId
from daemon.policy.residency import Residency
from experts.spec import ExpertId


class ExecutorQueues:
    """A queue per executor of `residency`; `preset` says who assigns, arranges and evicts."""

    def __init__(self, residency: Residency, preset: Preset) -> None:
        if preset.evict == "least wanted":
            raise ValueError(f"policy {preset.name}: evict 'least wanted' needs the demand table of a late binding")
        self._residency = residency
        self._queues = {
            name: Queue(name, facts.pool, residency.ledgers[facts.pool]) for name, facts in residency.executors.items()
        }
        everyone = tuple(self._queues.values())
        self._of_pool = {pool: [queue for queue in everyone if queue.pool == pool] for pool in residency.pools}
        self._costs = Costs(residency)
        self._candidates = Candidates(residency, everyone, self._costs)
        self._assign = ASSIGN[preset.assign](self._candidates, everyone, self._costs)
        self._arrange: Literal["last", "behind its group"] = preset.arrange
        self._chain_first = preset.chain_first
        self._order = ORDERS[preset.evict](residency, [queue.pool for queue in everyone])
        self._tier = RamTier(residency, everyone, self._order, self._costs)
        self._groups: dict[RequestId, QueuedGroup] = {}
        #: Loads under way, to notice those that fail.
        self._coming: dict[tuple[PoolId, ExpertId], None] = {}
        #: The queue that ended a batch last: the next steps of its images arrive right after that report.
        self._ended_last: Queue | None = None
        #: The residency's `room_changes` when requests were last assigned anew.
        self._room_changes = residency.room_changes

    # Requests

    def add(self, request: Request) -> None:
        expert = request.expert
        if self._chain_first and request.step > 0 and self._ended_last is not None:
            queue = self._ended_last
            if self._residency.may_take(queue.pool, expert):
                self._put(request, self._open(queue, expert, at_front=True))
                return
        self._enqueue(request, self._assign.choose(expert))

    def discard(self, request: Request) -> None:
        self._remove(request)

    def take(self, executor: ExecutorId, _now: float) -> tuple[Request, ...]:
        if self._room_changes != self._residency.room_changes:
            self.rebuild()
        queue = self._queues[executor]
        group = queue.head
        if group is None:
            return ()
        expert, pool = group.expert, queue.pool
        residency = self._residency
        if not queue.ledger.is_ready(expert) or expert in residency.leaving[pool] or expert in residency.draining[pool]:
            return ()
        count = min(self._residency.max_batch(pool, expert), len(group.requests))
        batch = tuple(group.requests.popitem(last=False)[1] for _ in range(count))
        queue.work_ns -= group.overhead_ns
        group.overhead_ns = 0
        queue.running = expert
        queue.running_ns = group.cost.each_ns * len(batch) + group.cost.start_ns
        queue.work_ns += group.cost.start_ns
        if not group.requests:
            queue.close(group)
        for request in batch:
            del self._groups[request.request_id]
        self._order.used(pool, expert)
        self._tier.residency_changed(expert)
        if self._ended_last is queue:
            self._ended_last = None
        return batch

    def ended(self, executor: ExecutorId, _expert: ExpertId, _count: int) -> None:
        queue = self._queues[executor]
        queue.running = None
        queue.work_ns -= queue.running_ns
        queue.running_ns = 0
        self._ended_last = queue

    # Memory

    def residency_changed(self, expert: ExpertId) -> None:
        self._order.residency_changed(expert)
        self._tier.residency_changed(expert)
        if not self._coming:
            return
        for pool, coming in [key for key in self._coming if key[1] == expert]:
            ledger = self._residency.ledgers[pool]
            if not ledger.is_loading(coming):
                del self._coming[pool, coming]
                if not ledger.holds(coming):
                    self._move_home(coming, pool)

    def wants(self, pool: PoolId, _now: float) -> Iterable[Want]:
        # Assign anew where budgets, pins or refusals have changed, before any pool is asked what it wants.
        if self._room_changes != self._residency.room_changes:
            self.rebuild()
        if pool == RAM:
            return self._tier.wants()
        if self._residency.ledgers[pool].loading_count:
            return ()
        return [
            Want(expert, "demand", "any")
            for queue in self._of_pool[pool]
            if (expert := queue.missing()) is not None
            and not self._residency.is_refused(pool, expert)
            and not self._tier.delays(queue, expert)
        ]

    def may_want(self, _pool: PoolId) -> bool:
        return True

    def granted(self, want: Want, pool: PoolId) -> None:
        self._coming[pool, want.expert] = None
        self._tier.granted(want.expert, pool)

    def victims(self, pool: PoolId, evict: Evict) -> Iterable[ExpertId]:
        if evict == "none":
            return ()
        return self._tier.victims() if pool == RAM else self._order.victims(pool)

    # Reading the state

    def requests_of(self, expert: ExpertId) -> tuple[Request, ...]:
        return tuple(
            request
            for queue in self._queues.values()
            for group in queue.groups
            if group.expert == expert
            for request in group.requests.values()
        )

    def queued(self) -> dict[ExpertId, int]:
        counts: dict[ExpertId, int] = {}
        for queue in self._queues.values():
            for group in queue.groups:
                counts[group.expert] = counts.get(group.expert, 0) + len(group.requests)
        return counts

    def next_turn_s(self, _now: float) -> float | None:
        return None

    def rebuild(self) -> None:
        """Predict everything again; rebind requests whose pool does not take their expert."""
        self._costs.forget()
        self._candidates.forget()
        self._order.rebuild()
        self._room_changes = self._residency.room_changes
        stranded: list[QueuedGroup] = []
        for queue in self._queues.values():
            queue.newest.clear()
            queue.work_ns = queue.running_ns
            for group in queue.groups:
                if all(possible.queue is not queue for possible in self._candidates.of(group.expert)):
                    stranded.append(group)
                group.cost = self._costs.of(queue.pool, group.expert)
                group.overhead_ns = self._overhead_ns(queue, group) if group.overhead_ns else 0
                queue.newest[group.expert] = group
                queue.work_ns += group.cost.each_ns * len(group.requests) + group.overhead_ns
        for group in stranded:
            for request in tuple(group.requests.values()):
                self._remove(request)
                self._enqueue(request, self._assign.choose(request.expert))

    # Parts

    def _enqueue(self, request: Request, queue: Queue) -> None:
        group = queue.group_for(request.expert, self._arrange)
        self._put(request, group or self._open(queue, request.expert))

    def _put(self, request: Request, group: QueuedGroup) -> None:
        group.requests[request.request_id] = request
        group.queue.work_ns += group.cost.each_ns
        self._groups[request.request_id] = group

    def _remove(self, request: Request) -> None:
        group = self._groups.pop(request.request_id)
        del group.requests[request.request_id]
        group.queue.work_ns -= group.cost.each_ns
        if not group.requests:
            group.queue.close(group)

    def _open(self, queue: Queue, expert: ExpertId, *, at_front: bool = False) -> QueuedGroup:
        group = QueuedGroup(expert, queue, self._costs.of(queue.pool, expert), 0)
        group.overhead_ns = self._overhead_ns(queue, group)
        queue.open(group, at_front=at_front)
        return group

    def _overhead_ns(self, queue: Queue, group: QueuedGroup) -> int:
        """Return the cost of the first request of `group` beside K: nothing if its expert is queued there already."""
        if group.expert in queue.newest:
            return 0
        cost = group.cost
        load_ns = 0 if queue.ledger.is_ready(group.expert) else self._costs.load_ns(cost, group.expert)
        return cost.start_ns + load_ns

    def _move_home(self, expert: ExpertId, pool: PoolId) -> None:
        """A load failed: requests that wait for it go to executors that have the expert, if any."""
        homes = [queue for queue in self._queues.values() if self._residency.can_run(queue.pool, expert)]
        served = self._queues.values() if pool == RAM else self._of_pool[pool]
        for queue in [queue for queue in served if homes and queue.missing() == expert]:
            for group in [group for group in queue.groups if group.expert == expert]:
                for request in tuple(group.requests.values()):
                    self._remove(request)
                    self._enqueue(request, min(homes, key=lambda queue: queue.work_ns))
