"""What a policy returns: values that a driver carries out and reports back on."""

from dataclasses import dataclass
from typing import Literal

from daemon.policy.request import ExecutorId, PoolId, Request
from experts.spec import ExpertId

Cause = Literal["demand", "prefetch", "startup", "pin"]


@dataclass(frozen=True, slots=True)
class Load:
    """Bring `expert` into `pool` after evicting `evict`, in that order."""

    pool: PoolId
    expert: ExpertId
    evict: tuple[ExpertId, ...]
    cause: Cause


@dataclass(frozen=True, slots=True)
class Run:
    """Run one batch of requests of one resident expert on `executor`."""

    executor: ExecutorId
    expert: ExpertId
    batch: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until_s` (seconds, the driver's clock), or before the next report where None."""

    until_s: float | None = None
