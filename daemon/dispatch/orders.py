"""What the drive hands to executors and loaders, what they report, and what the drive asks of either.

The real ones are threads (executors.py, loader.py); the simulated ones (simulated.py) keep the same contract. `Devices`
makes either: torch is imported behind it alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from daemon.policy.actions import Load, Resize, Run, Unload
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId, Request, RequestId
from daemon.records import BatchDone, ExpertSwitch, JournalKey, Pixels, Stage
from experts.spec import Answer, ExpertId, ExpertSpec

#: Why an image has no answer although its batch ran (PROTOCOL.md, `reason` of `unknown`). `unreadable`: its bytes could
#: not be read just now; it is tried again.
Fault = Literal["bad_image", "expert_failed", "unreadable"]


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
    `memory_limit` is the largest batch that still fitted where this one ran out of memory; `device_error` is what the
    device said where it, and not the work, has failed.
    """

    executor: ExecutorId
    batch_id: int
    results: tuple[Answered | Unanswered, ...]
    started_s: float
    ended_s: float
    infer_ms: float
    memory_limit: int | None = None
    device_error: str | None = None


@dataclass(frozen=True, slots=True)
class LoadOrder:
    load: Load
    spec: ExpertSpec


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The end of a load; `error` says what was wrong and what to do, None for a load that succeeded.

    `is_device_error`: the device has failed, not the expert.
    """

    load: Load
    spec: ExpertSpec
    bytes: int
    load_ms: float
    tier: Literal["ram", "disk"]
    error: str | None = None
    is_device_error: bool = False


class Executor(Protocol):
    """One stream of batches on one device. At most one batch is under way."""

    @property
    def facts(self) -> ExecutorFacts: ...

    def start(self, report: Callable[[BatchReport], None]) -> None: ...

    def submit(self, order: BatchOrder) -> None:
        """Run `order`; its report follows, whatever happens."""
        ...

    def give_up(self) -> RequestId | None:
        """Leave the batch under way behind and be ready for the next; should it ever end, its report follows.

        The image that was being decoded, None where it was not decoding that did not end.
        """
        ...

    def stop(self, timeout_s: float) -> bool:
        """Finish what runs, and end. False where that took longer than `timeout_s` seconds."""
        ...


class Loader(Protocol):
    """Changes of one pool's residents: evictions and budgets at once, loads in their turn on a channel."""

    @property
    def pool(self) -> PoolId: ...

    def start(self, report: Callable[[LoadEnd], None]) -> None: ...

    def apply(self, change: LoadOrder | Unload | Resize) -> None:
        """Carry out a change of the residents. A `LoadOrder` is reported, whatever happens; the others are not."""
        ...

    def under_way(self) -> Sequence[tuple[Load, float]]:
        """Loads whose transfer has begun, each with when. One that is reported is not among them any more."""
        ...

    def give_up(self, load: Load) -> None:
        """Do not let others wait for `load`, which is under way; should it ever end, it is reported."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """Finish the load under way, give up those that wait. False where that took longer than `timeout_s`."""
        ...


class LoadedBytes(Protocol):
    """What a pool says of one load (experts.slot.LoadReport)."""

    @property
    def bytes(self) -> int: ...
    @property
    def load_ms(self) -> float: ...
    @property
    def tier(self) -> Literal["ram", "disk"]: ...


class Slot(Protocol):
    """A place in a pool, with one expert's weights in it (experts.slot.Slot)."""

    @property
    def spec(self) -> ExpertSpec: ...


class Pool(Protocol):
    """One device's memory for experts (experts.slot.SlotPool).

    `source` is a pool of the same kind (real or simulated), which holds the expert; without one it is read from disk.
    """

    @property
    def device(self) -> str: ...
    @property
    def budget_bytes(self) -> int: ...
    def load(self, spec: ExpertSpec, evict: tuple[ExpertId, ...] = (), source: Any = None) -> LoadedBytes: ...
    def slot(self, expert: ExpertId) -> Any:
        """Return the `Slot` of a resident expert; ExpertError where it is not resident."""
        ...

    def unload(self, expert: ExpertId) -> None: ...
    def resize(self, budget_bytes: int) -> None: ...
    def resident(self) -> Sequence[ExpertId]: ...


class Devices(Protocol):
    """The processors that a line runs on: real ones (torch_devices.py) or simulated ones (simulated.py)."""

    def pool(self, facts: PoolFacts) -> Pool:
        """Return memory for experts, empty."""
        ...

    def executor(
        self,
        facts: ExecutorFacts,
        pool: Any,
        read: Callable[[JournalKey], bytes],
        threads: int,
        mark: Callable[[JournalKey | None], None],
    ) -> Executor:
        """Return an executor over `pool`, one of this object's.

        `read(key)` gives an image's bytes; `threads` are its intra-op threads; `mark(key)` notes the image that is
        being decoded, None when none is: for the start after a crash (storage/decode_marks.py).
        """
        ...


def device_of(pool: PoolId) -> str:
    """`cpu` of the pools `cpu` and `cpu/0`."""
    return pool.partition("/")[0]


@dataclass(frozen=True, slots=True)
class FreshLoad:
    """A load that no batch has run after yet: the first one tells of it. `ended_s` is of the drive's clock."""

    load_ms: float
    ended_s: float

    def held_up_ms(self, batch: Sequence[Request]) -> float:
        """How long the first of `batch` waited for this load; 0 where it came later: start-up, a prefetch in time."""
        since_s = min(request.arrived_s for request in batch)
        return min(self.load_ms, max(0.0, self.ended_s - since_s) * 1000.0)


def stage_of(
    request: Request, result: Answered, order: BatchOrder, report: BatchReport, pool: PoolId, load_ms: float
) -> Stage:
    """`load_ms` is how long this batch waited for a load, 0 where its expert was resident already."""
    return Stage(
        expert=request.expert,
        expert_version=order.spec.version,
        label=result.answer.label,
        confidence=result.answer.confidence,
        detections=result.answer.detections,
        device=device_of(pool),
        executor=report.executor,
        batch_id=report.batch_id,
        batch_size=len(report.results),
        queued_ms=max(0.0, report.started_s - request.arrived_s) * 1000.0,
        load_ms=load_ms,
        infer_ms=report.infer_ms,
    )


def batch_of(
    run: Run, order: BatchOrder, report: BatchReport, pool: PoolId, load_ms: float, wall_ahead_s: float
) -> BatchDone:
    """`wall_ahead_s` is what the wall clock shows more than the drive's."""
    return BatchDone(
        executor=report.executor,
        device=device_of(pool),
        expert=run.expert,
        architecture=order.spec.architecture,
        step=run.batch[0].step,
        images=len(run.batch),
        started_wall_s=report.started_s + wall_ahead_s,
        ended_wall_s=report.ended_s + wall_ahead_s,
        load_ms=load_ms,
        infer_ms=report.infer_ms,
    )


def switch_of(end: LoadEnd, at_wall_s: float) -> ExpertSwitch:
    load = end.load
    return ExpertSwitch(
        at_wall_s=at_wall_s,
        executor=load.pool,
        device=device_of(load.pool),
        loaded=load.expert,
        evicted=load.evict,
        bytes=end.bytes,
        load_ms=end.load_ms,
        tier=end.tier,
        cause=load.cause,
    )
