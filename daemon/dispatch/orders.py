"""The contract between the drive and its devices, real (executors.py, loader.py) or simulated (simulated.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from daemon.policy.actions import Load, Resize, Unload
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId, RequestId
from daemon.records import JournalKey, Pixels
from experts.spec import Answer, ExpertId, ExpertSpec, LoadReport

#: Why an image of a finished batch has no answer (PROTOCOL.md, `reason` of `unknown`). `unreadable`: its bytes could
#: not be read this time; the image is retried.
Fault = Literal["bad_image", "expert_failed", "unreadable"]


@dataclass(frozen=True, slots=True)
class ImageOrder:
    """An image to judge: by `head` on the batch's backbone, else by the batch's expert."""

    request_id: RequestId
    key: JournalKey
    pixels: Pixels
    head: ExpertSpec | None = None


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Images to run through one resident expert, or through a backbone and each then through its head."""

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
    `memory_limit` is the largest batch that fitted, if this one ran out of memory; `device_error` is the device's
    error, if the device failed and not the work. With `is_lost` the device is gone: another PC, or the way there.
    """

    executor: ExecutorId
    batch_id: int
    results: tuple[Answered | Unanswered, ...]
    started_s: float
    ended_s: float
    infer_ms: float
    memory_limit: int | None = None
    device_error: str | None = None
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class LoadOrder:
    load: Load
    spec: ExpertSpec


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The end of a load. `error` says what was wrong and what to do; `is_device_error` if the device failed."""

    load: Load
    spec: ExpertSpec
    bytes: int
    load_ms: float
    tier: Literal["ram", "disk"]
    error: str | None = None
    is_device_error: bool = False


class Executor(Protocol):
    """One stream of batches on one device; at most one batch runs at a time."""

    @property
    def facts(self) -> ExecutorFacts: ...

    def start(self, report: Callable[[BatchReport], None]) -> None: ...

    def submit(self, order: BatchOrder) -> None:
        """Run a batch. Its report follows in every case."""
        ...

    def give_up(self) -> RequestId | None:
        """Abandon the running batch, whose report may still follow; return the image that was being decoded."""
        ...

    def stop(self, timeout_s: float) -> bool: ...


class Loader(Protocol):
    """Changes the residents of one pool: evictions and budgets at once, loads in turn on a channel."""

    @property
    def pool(self) -> PoolId: ...

    def start(self, report: Callable[[LoadEnd], None]) -> None: ...

    def apply(self, change: LoadOrder | Unload | Resize) -> None:
        """Carry out a change. A `LoadOrder` is always reported; the others are not."""
        ...

    def under_way(self) -> Sequence[tuple[Load, float]]:
        """Return running transfers with their start times, without reported ones."""
        ...

    def give_up(self, load: Load) -> None:
        """Let other loads pass `load`, which is under way. If it ever ends, it is reported."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """Finish the running load, drop waiting ones; False after `timeout_s` seconds."""
        ...


class Slot(Protocol):
    """A place in a pool, with one expert's weights in it (experts.vision.slot.Slot)."""

    @property
    def spec(self) -> ExpertSpec: ...


class Pool(Protocol):
    """One device's memory for experts. A load copies from the pool `source`, or else reads the disk."""

    @property
    def device(self) -> str: ...
    @property
    def budget_bytes(self) -> int: ...
    def load(self, spec: ExpertSpec, evict: tuple[ExpertId, ...] = (), source: Any = None) -> LoadReport: ...
    def unload(self, expert: ExpertId) -> None: ...
    def resize(self, budget_bytes: int) -> None: ...


class Devices(Protocol):
    """The processors that a line runs on: real ones (torch_devices.py) or simulated ones (simulated.py)."""

    def gpu_count(self) -> int:
        """Count GPUs: `cuda:0` up to, not including, `cuda:<count>`."""
        ...

    def pool(self, facts: PoolFacts) -> Pool: ...

    def executor(
        self,
        facts: ExecutorFacts,
        pool: Any,
        read: Callable[[JournalKey], bytes],
        threads: int,
        mark: Callable[[JournalKey | None], None],
        max_pixels: int,
    ) -> Executor:
        """Return an executor over `pool`. `read(key)` gives an image's bytes; `mark(key)` notes the one in decoding."""
        ...
