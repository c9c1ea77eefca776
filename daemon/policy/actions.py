"""Values that a driver gets: actions, which it carries out and reports back on, and snapshots of the state."""

from dataclasses import dataclass
from typing import Literal

from daemon.policy.request import ExecutorId, PoolId, Request
from experts.spec import ExpertId

Cause = Literal["demand", "prefetch", "startup", "pin"]


@dataclass(frozen=True, slots=True)
class Load:
    """Bring `expert` into `pool` after evicting `evict`, in that order. Reported back as done or failed.

    `source` is the pool that its bytes are copied from (another device's or the RAM tier; it stays resident there until
    the load has ended); without it they come from disk.
    """

    pool: PoolId
    expert: ExpertId
    evict: tuple[ExpertId, ...]
    cause: Cause
    source: PoolId | None = None


@dataclass(frozen=True, slots=True)
class Unload:
    """Free `experts` of `pool`. The ledger has forgotten them: carry it out before any later load there."""

    pool: PoolId
    experts: tuple[ExpertId, ...]


@dataclass(frozen=True, slots=True)
class Resize:
    """The budget of `pool` from now on; what is resident fits it. Carry it out before any later load there."""

    pool: PoolId
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of requests of one resident expert on `executor`."""

    executor: ExecutorId
    expert: ExpertId
    batch: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until_s` (seconds, the driver's clock), or before the next report where None."""

    until_s: float | None = None


#: Nothing until the next report.
NOTHING = Wait()


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    pool: PoolId
    resident: tuple[ExpertId, ...]
    loading: tuple[ExpertId, ...]
    pinned: tuple[ExpertId, ...]
    used_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment's state. `queued` counts requests by expert, `running` names each busy executor's expert."""

    pools: tuple[PoolSnapshot, ...]
    queued: dict[ExpertId, int]
    running: dict[ExecutorId, ExpertId]
    failed: dict[ExpertId, str]
