"""What policies know of the world: requests, experts, pools and executors, as values."""

from dataclasses import dataclass
from typing import Literal, NewType

from experts.spec import ArchitectureId, ExpertId

RequestId = NewType("RequestId", int)
ExecutorId = NewType("ExecutorId", str)
#: A pool is named by its device: "cpu", "cuda:0".
PoolId = NewType("PoolId", str)


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
    """What is known of an expert before any image runs.

    `usage` is the probability that an image uses it; `then` lists the subsequent experts with the share of
    this expert's images that go on to each (CoServe §4.5).
    """

    expert: ExpertId
    architecture: ArchitectureId
    weights_bytes: int
    usage: float
    then: tuple[tuple[ExpertId, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One device's expert memory. `max_batch` bounds a batch there, per architecture."""

    pool: PoolId
    processor: Literal["gpu", "cpu"]
    budget_bytes: int
    max_batch: int


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    executor: ExecutorId
    pool: PoolId
