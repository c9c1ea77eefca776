"""The state of the pools and queues, as values: for status, for people, for tests."""

from dataclasses import dataclass

from daemon.policy.request import ExecutorId, PoolId
from experts.spec import ExpertId


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
    """One moment's state. `queued` counts waiting requests by expert, `running` names each busy executor's expert."""

    pools: tuple[PoolSnapshot, ...]
    queued: dict[ExpertId, int]
    running: dict[ExecutorId, ExpertId]
    failed: dict[ExpertId, str]
