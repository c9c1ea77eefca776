"""The scheduler's interface to a policy: the queues, the next batch, the next load, the next eviction."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from daemon.policy.actions import Cause
from daemon.policy.request import ExecutorId, PoolId, Request
from experts.spec import ExpertId

#: Whom a load may evict: nobody, experts without demand, or anybody idle and unpinned.
Evict = Literal["nobody", "unwanted", "anybody"]


@dataclass(frozen=True, slots=True)
class Want:
    """An expert that should come into a pool. `aged`: its requests have waited long enough to pull it forward."""

    expert: ExpertId
    cause: Cause
    evict: Evict
    aged: bool = False


class Discipline(Protocol):
    """Requests between arrival and batch. Only the scheduler calls it; `wants` and `victims` change nothing."""

    def add(self, request: Request) -> None: ...

    def discard(self, request: Request) -> None:
        """`request` leaves the queue without having run."""
        ...

    def take(self, executor: ExecutorId, now: float, /) -> tuple[Request, ...]:
        """Remove and return the next batch, all of one expert that can run in the executor's pool; empty: wait."""
        ...

    def ended(self, executor: ExecutorId, expert: ExpertId, count: int, /) -> None:
        """`count` requests of `expert`, taken before by `executor`, have run."""
        ...

    def moved(self, expert: ExpertId) -> None:
        """`expert` has become resident somewhere, is on its way, or has left."""
        ...

    def wants(self, pool: PoolId, now: float, /) -> Iterable[Want]:
        """Experts to load into `pool`, the most wanted first."""
        ...

    def granted(self, want: Want, pool: PoolId, /) -> None:
        """The load of `want` has begun."""
        ...

    def victims(self, pool: PoolId, evict: Evict, /) -> Iterable[ExpertId]:
        """Residents of `pool` in the order in which they should go."""
        ...

    def requests_of(self, expert: ExpertId) -> tuple[Request, ...]: ...

    def queued(self) -> dict[ExpertId, int]:
        """Waiting requests by expert, in a stable order; experts without any are left out."""
        ...

    def next_turn_s(self, now: float, /) -> float | None:
        """When age alone will change an answer; None where only a report can."""
        ...

    def rebuild(self) -> None:
        """The facts have changed: compute everything derived from them again."""
        ...

    def check(self) -> None:
        """Raise AssertionError where an index disagrees with the requests it indexes."""
        ...
