"""One executor's queue: groups of requests in running order, and the place of a new request (O(1))."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from daemon.policy.paper.cost import Cost
from daemon.policy.request import ExecutorId, PoolId, Request, RequestId
from experts.ledger import Ledger
from experts.spec import ExpertId


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
