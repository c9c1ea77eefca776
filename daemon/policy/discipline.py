"""The scheduler's interface to a policy: the queues, the next batch, the next load, the next eviction."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from daemon.policy.actions import Cause
from daemon.policy.request import ExecutorId, PoolId, Request
from experts.spec import ExpertId

#: Experts that a load may evict: none, those without demand, or every one that is idle and not pinned.
Evict = Literal["none", "unwanted", "any"]


@dataclass(frozen=True, slots=True)
class Want:
    """An expert that should come into a pool. `is_due`: a request waited for `max_wait_s`, or its deadline is near."""

    expert: ExpertId
    cause: Cause
    evict: Evict
    is_due: bool = False


class Discipline(Protocol):
    """The requests between arrival and batch. Only the scheduler calls it; `wants` and `victims` change nothing."""

    def add(self, request: Request) -> None: ...

    def discard(self, request: Request) -> None: ...

    def take(self, executor: ExecutorId, now: float, /) -> tuple[Request, ...]:
        """Remove and return the next batch, all of one expert that can run in the executor's pool; empty: wait."""
        ...

    def ended(self, executor: ExecutorId, expert: ExpertId, count: int, /) -> None:
        """Note that `count` requests of `expert`, taken before by `executor`, have run."""
        ...

    def residency_changed(self, expert: ExpertId) -> None:
        """Note that `expert` has become resident somewhere, is being loaded, or has left."""
        ...

    def wants(self, pool: PoolId, now: float, /) -> Iterable[Want]:
        """Return the experts to load into `pool`, the most wanted first."""
        ...

    def may_want(self, pool: PoolId, /) -> bool:
        """Return False if `wants` would answer for `pool` as it did the last time, apart from the effect of time."""
        ...

    def granted(self, want: Want, pool: PoolId, /) -> None: ...

    def victims(self, pool: PoolId, evict: Evict, /) -> Iterable[ExpertId]:
        """Return the residents of `pool` in the order in which they should leave."""
        ...

    def requests_of(self, expert: ExpertId) -> tuple[Request, ...]: ...

    def queued(self) -> dict[ExpertId, int]:
        """Count waiting requests by expert, in a stable order, without zeros."""
        ...

    def next_turn_s(self, now: float, /) -> float | None:
        """Return when an answer changes by time alone; None if only a report can change it."""
        ...

    def rebuild(self) -> None:
        """Recompute everything derived from the facts: they have changed."""
        ...
