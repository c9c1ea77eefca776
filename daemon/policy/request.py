"""Values that policies decide on: requests, experts, pools and executors."""

from dataclasses import dataclass
from typing import Literal, NewType

from experts.spec import ArchitectureId, ExpertId

RequestId = NewType("RequestId", int)
ExecutorId = NewType("ExecutorId", str)
#: A pool is named by its device ("cpu", "cuda:0") or, if each executor has its own share, by the executor ("cpu/0").
PoolId = NewType("PoolId", str)
#: The RAM tier: experts kept in host memory for GPUs. No executor runs there.
RAM = PoolId("ram")

Processor = Literal["gpu", "cpu", "ram"]


def device_of(pool: PoolId) -> str:
    """Return the device of a pool: `cpu` for the pools `cpu` and `cpu/0`."""
    return pool.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Request:
    """One image at one expert. Times are seconds on the clock that the driver passes in as `now`."""

    request_id: RequestId
    expert: ExpertId
    arrived_s: float
    deadline_s: float | None = None
    step: int = 0


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """Facts of an expert that are known before any image runs.

    `usage` is the probability that an image uses it; `then` lists the subsequent experts with the share of this
    expert's images that go on to each (CoServe §4.5).
    """

    expert: ExpertId
    architecture: ArchitectureId
    weights_bytes: int
    usage: float
    then: tuple[tuple[ExpertId, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """Expert memory of a device, or of one executor of it. `max_batch` bounds a batch there.

    `activation_bytes` is what each executor has for a batch's intermediate results; None: not bounded. `host` is the PC
    that the device is in, "" for the line's own: nothing is copied between pools of two PCs.
    """

    pool: PoolId
    processor: Processor
    budget_bytes: int
    max_batch: int
    activation_bytes: int | None = None
    host: str = ""

    @property
    def is_remote(self) -> bool:
        return self.host != ""

    @property
    def device(self) -> str:
        return device_of(self.pool)


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    executor: ExecutorId
    pool: PoolId
