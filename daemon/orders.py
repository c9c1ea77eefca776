"""What the drive hands to executors and loaders, what they report, and what the drive asks of either.

The real ones are threads (executors.py, loader.py); the simulated ones (fakes.py) keep the same contract.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from daemon.policy.actions import Load, Resize, Unload
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolId, RequestId
from daemon.records import JournalKey, Pixels
from experts.spec import Answer, ExpertId, ExpertSpec

#: Why an image has no answer although its batch ran (PROTOCOL.md, `reason` of `unknown`).
Fault = Literal["bad_image", "expert_failed"]


@dataclass(frozen=True, slots=True)
class ImageOrder:
    request_id: RequestId
    key: JournalKey
    pixels: Pixels


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Run these images through one resident expert."""

    batch_id: int
    spec: ExpertSpec
    images: tuple[ImageOrder, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """`image_size` is (width, height) of the stored image."""

    answer: Answer
    image_size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Unanswered:
    fault: Fault
    detail: str


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The end of a batch: one result per image, in the order's order.

    `started_s` and `ended_s` are the drive's clock; `infer_ms` is the time in the network and its head alone.
    `memory_limit` is the largest batch that still fitted where this one ran out of memory.
    """

    executor: ExecutorId
    batch_id: int
    results: tuple[Answered | Unanswered, ...]
    started_s: float
    ended_s: float
    infer_ms: float
    memory_limit: int | None = None


@dataclass(frozen=True, slots=True)
class LoadOrder:
    load: Load
    spec: ExpertSpec


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The end of a load; `error` says what was wrong and what to do, None for a load that succeeded."""

    load: Load
    spec: ExpertSpec
    bytes: int
    load_ms: float
    tier: Literal["ram", "disk"]
    error: str | None = None


class Executor(Protocol):
    """One stream of batches on one device. At most one batch is under way."""

    @property
    def facts(self) -> ExecutorFacts: ...

    def start(self, report: Callable[[BatchReport], None]) -> None: ...

    def submit(self, order: BatchOrder) -> None:
        """Run `order`; its report follows, whatever happens."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """Finish what runs, and end. False where that took longer than `timeout_s` seconds."""
        ...


class Loader(Protocol):
    """Changes of one pool's residents, carried out in the order in which they were submitted."""

    @property
    def pool(self) -> PoolId: ...

    def start(self, report: Callable[[LoadEnd], None]) -> None: ...

    def submit(self, order: LoadOrder | Unload | Resize) -> None:
        """A `LoadOrder` is reported, whatever happens; the others are not."""
        ...

    def stop(self, timeout_s: float) -> bool: ...


class LoadedBytes(Protocol):
    """What a pool says of one load (experts.slot.LoadReport)."""

    @property
    def bytes(self) -> int: ...
    @property
    def load_ms(self) -> float: ...
    @property
    def tier(self) -> Literal["ram", "disk"]: ...


class Pool(Protocol):
    """What a loader needs of a device's memory (experts.slot.SlotPool)."""

    def load(self, spec: ExpertSpec, evict: tuple[ExpertId, ...] = ()) -> LoadedBytes: ...
    def unload(self, expert: ExpertId) -> None: ...
    def resize(self, budget_bytes: int) -> None: ...
    def resident(self) -> Sequence[ExpertId]: ...
