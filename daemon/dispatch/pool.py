"""One device: memory for experts, the channels that fill it, and the threads that run batches.

The drive sees a `Pool`: a device of this PC (`DevicePool`), of another PC (daemon/cluster) or a simulated one.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import structlog

from daemon.dispatch.channels import Channel, Channels
from daemon.errors import is_device_error, ran_out_of_memory
from daemon.host.worker import Worker
from daemon.policy.actions import Load
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId, Request, device_of
from daemon.records import JournalKey, Pixels
from daemon.storage.journal import JournalError
from experts.errors import ExpertError, ImageError
from experts.spec import Answer, ExpertId, ExpertSpec, LoadReport, name_of
from experts.vision.preprocess import MAX_PIXELS, Prepared, prepare

#: Accepting images goes before inference: publishers wait, verdicts have a queue (docs/decisions.md, measured).
_NICENESS = 5
_NOT_NUMBERS = "the network's outputs are not finite numbers: import the expert again"


# Batches and loads


class StoredImage(Protocol):
    """The place and encoding of an image's bytes."""

    @property
    def key(self) -> JournalKey: ...
    @property
    def pixels(self) -> Pixels: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an image of a batch has no answer (PROTOCOL.md, `reason` of `unknown`).

    `unreadable`: its bytes could not be read this time; the image is retried.
    """

    kind: Literal["bad_image", "expert_failed", "unreadable"]
    detail: str

    @classmethod
    def from_unread(cls, error: JournalError) -> "Fault":
        """A disk that refuses to read may recover; altered bytes stay altered."""
        return cls("unreadable" if isinstance(error.__cause__, OSError) else "bad_image", str(error))


@dataclass(slots=True, eq=False)
class Batch:
    """Images for one resident expert, or for a backbone and each then for its head: filled by a pool, handed back once.

    Specs are those of the start: a change of editions changes no running batch. `load_ms` is how long it waited for a
    load. Times are seconds on the drive's clock.
    """

    number: int
    executor: ExecutorId
    spec: ExpertSpec
    images: Sequence[StoredImage]
    heads: Sequence[ExpertSpec | None]
    requests: tuple[Request, ...] = ()
    load_ms: float = 0.0
    began_s: float = 0.0

    # Filled by the pool. Sizes are (width, height) of the stored images, `infer_ms` the time in the network and its
    # heads alone. `memory_limit` is the largest batch that fitted if this one ran out of memory, `device_error` the
    # error of a device that failed; `is_lost`: it is gone (another PC, or the way there).
    answers: list[Answer | Fault] = field(init=False)
    sizes: list[tuple[int, int]] = field(init=False)
    started_s: float = 0.0
    ended_s: float = 0.0
    infer_ms: float = 0.0
    memory_limit: int | None = None
    device_error: str | None = None
    is_lost: bool = False

    # Shared by the drive's thread and the pool's: the image being decoded, and whether the drive gave the batch up.
    decoding: int | None = None
    is_abandoned: bool = False

    def __post_init__(self) -> None:
        self.fail("the batch has not run")
        self.sizes = [(0, 0)] * len(self.images)

    def fail(self, reason: str) -> None:
        self.answers = [Fault("expert_failed", reason)] * len(self.images)

    def expert_of(self, number: int) -> ExpertSpec:
        return self.heads[number] or self.spec

    @property
    def has_answers(self) -> bool:
        return any(isinstance(answer, Answer) for answer in self.answers)


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


class Pool(Protocol):
    """Expert memory of one device, or of one executor of it, and the executors that use it. Drive thread only.

    `unload` and `resize` take effect at once and before later loads; they cannot be refused: the ledger has moved on.
    """

    @property
    def pool(self) -> PoolId: ...
    @property
    def device(self) -> str: ...
    @property
    def budget_bytes(self) -> int: ...

    def start(self) -> None: ...

    def load(self, load: Load, spec: ExpertSpec, done: Callable[[LoadEnd], None]) -> None:
        """Evict at once, then load in turn. `done` is called in every case."""
        ...

    def unload(self, experts: Iterable[ExpertId]) -> None: ...

    def resize(self, budget_bytes: int) -> None: ...

    def loads_under_way(self) -> Sequence[tuple[Load, float]]:
        """Return running transfers with their start times, without those that are done."""
        ...

    def abandon_load(self, load: Load) -> None:
        """Let other loads pass `load`, which is under way. If it ever ends, `done` is called."""
        ...

    def run(self, batch: Batch, done: Callable[[Batch], None]) -> None:
        """Run a batch on its executor, which is idle. `done` is called in every case."""
        ...

    def abandon_batch(self, batch: Batch) -> None:
        """Free the executor of a batch that takes too long. If it ever ends, `done` is called."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """Finish running work, drop waiting loads; False after `timeout_s` seconds."""
        ...


Read = Callable[[JournalKey], bytes]
#: Notes the image in a decoder, None when none is there, for the start after a crash (storage/suspect_images.py).
Mark = Callable[[JournalKey | None], None]


class Devices(Protocol):
    """The processors that a line runs on: real ones (torch_devices.py), simulated ones, and those of other PCs."""

    def gpu_count(self) -> int:
        """Count GPUs: `cuda:0` up to, not including, `cuda:<count>`."""
        ...

    def pools(
        self,
        facts: Sequence[PoolFacts],
        executors: Sequence[ExecutorFacts],
        read: Read,
        new_mark: Callable[[], Mark],
        max_pixels: int,
    ) -> Sequence[Pool]:
        """Return a pool for each of `facts`. `read(key)` gives an image's bytes; each executor has its own mark."""
        ...


# Pools of real threads


class Slot(Protocol):
    """A place in memory with one expert's weights in it (experts.vision.slot.Slot)."""

    @property
    def spec(self) -> ExpertSpec: ...


class Slots(Protocol):
    """A device's memory in slots. A load copies from the memory `source`, or else reads the disk."""

    @property
    def budget_bytes(self) -> int: ...
    def slot(self, expert: ExpertId) -> Any: ...
    def load(self, spec: ExpertSpec, *, source: Any = None) -> LoadReport: ...
    def unload(self, expert: ExpertId) -> None: ...
    def resize(self, budget_bytes: int) -> None: ...


class ThreadedPool:
    """Loads into `slots` in turn on channels; a thread for each executor, which a subclass's `run` gives its work.

    Evictions, unloads and smaller budgets take effect at once, in the order of the calls. The scheduler's decisions
    then fit the budget whichever waiting load goes first, so that on a channel a demand may overtake a prefetch of its
    pool. `sources` are the memories that weights can be copied from; `enter` prepares an executor's thread.
    """

    def __init__(
        self,
        pool: PoolId,
        executors: Iterable[ExecutorId],
        slots: Slots,
        channels: Channels,
        sources: Mapping[PoolId, Slots] | None = None,
        enter: Callable[[], None] | None = None,
    ) -> None:
        self.pool, self.device = pool, device_of(pool)
        self.slots = slots
        self._sources = sources or {}
        self._from_disk, self._from_memory = channels.disk, channels.copying_to(pool)
        self._workers: dict[ExecutorId, Worker[Callable[[], None]]] = {
            executor: Worker(f"executor {executor}", lambda work: work(), enter) for executor in executors
        }
        self._log: Any = structlog.get_logger("pool").bind(device=pool)

    @property
    def budget_bytes(self) -> int:
        return self.slots.budget_bytes

    def start(self) -> None:
        self._from_disk.open()
        self._from_memory.open()
        for worker in self._workers.values():
            worker.start()

    def stop(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        ends = [*(worker.stop for worker in self._workers.values()), self._from_disk.close, self._from_memory.close]
        ended = [end(max(0.0, until_s - time.monotonic())) for end in ends]
        return all(ended)

    # Loads

    def load(self, load: Load, spec: ExpertSpec, done: Callable[[LoadEnd], None]) -> None:
        self._evict(load.evict)
        self._channel(load).transfer(load, lambda: self._load(load, spec), done)

    def unload(self, experts: Iterable[ExpertId]) -> None:
        experts = tuple(experts)
        self._evict(experts)
        self._log.info("experts_unloaded", experts=[*map(name_of, experts)])

    def resize(self, budget_bytes: int) -> None:
        try:
            self.slots.resize(budget_bytes)
        except Exception:  # noqa: BLE001  as in `_evict`
            self._log.exception("budget_not_changed", budget_bytes=budget_bytes)
        else:
            self._log.info("budget_changed", budget_bytes=budget_bytes)

    def loads_under_way(self) -> list[tuple[Load, float]]:
        begun = (self._from_disk.under_way, self._from_memory.under_way)
        return [transfer for transfer in begun if transfer is not None and transfer[0].pool == self.pool]

    def abandon_load(self, load: Load) -> None:
        """Let other loads go on; the slot that is being filled stays taken until the transfer ends."""
        self._channel(load).abandon(load)

    def _channel(self, load: Load) -> Channel:
        return self._from_disk if load.source is None else self._from_memory

    def _evict(self, experts: Iterable[ExpertId]) -> None:
        for expert in experts:
            try:
                self.slots.unload(expert)
            except Exception:  # noqa: BLE001  the ledger has moved on; the slots refuse what would not fit
                self._log.exception("expert_not_unloaded", expert=name_of(expert))

    def _load(self, load: Load, spec: ExpertSpec) -> LoadEnd:
        begin_s = time.monotonic()
        try:
            source = None if load.source is None else self._sources[load.source]
            done = self.slots.load(spec, source=source)
        except Exception as error:  # noqa: BLE001  a damaged file, or a defect, costs this expert only
            text = str(error) if isinstance(error, ExpertError) else f"{type(error).__name__}: {error}"
            self._log.error("expert_load_failed", expert=name_of(load.expert), error=text)
            spent_ms = (time.monotonic() - begin_s) * 1000.0
            return LoadEnd(load, spec, 0, spent_ms, "disk", text, is_device_error(error.__cause__ or error))
        self._log.info(
            "expert_loaded", expert=name_of(load.expert), bytes=done.bytes, load_ms=round(done.load_ms, 2),
            tier=done.tier, cause=load.cause, evicted=[*map(name_of, load.evict)],
        )  # fmt: skip
        return LoadEnd(load, spec, done.bytes, done.load_ms, done.tier)

    # Batches

    def abandon_batch(self, batch: Batch) -> None:
        """Hand further batches to a new thread, and with it a new stream."""
        self._workers[batch.executor] = self._workers[batch.executor].successor()


class _AbandonedError(Exception):
    """The batch took too long."""


class DevicePool(ThreadedPool):
    """A device of this PC: journal keys in, answers out. A fault costs an image or a batch, never the thread.

    `infer(slot, images, experts)` is the forward pass: for each image, in order, the answer of its expert, or why that
    one has none. A decoder refuses more than `max_pixels`.
    """

    def __init__(  # noqa: PLR0913  tests set each
        self,
        pool: PoolId,
        executors: Iterable[ExecutorId],
        slots: Slots,
        infer: Callable[[Any, Sequence[Prepared], Sequence[ExpertSpec]], Sequence[Answer | ExpertError]],
        read: Read,
        *,
        channels: Channels | None = None,
        sources: Mapping[PoolId, Slots] | None = None,
        enter: Callable[[], None] = lambda: None,
        new_mark: Callable[[], Mark] = lambda: lambda _key: None,
        max_pixels: int = MAX_PIXELS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        def enter_nicely() -> None:
            with suppress(OSError):  # a sandbox may forbid it
                os.nice(_NICENESS)  # on Linux a thread's own, and that of threads it starts
            enter()

        super().__init__(pool, executors, slots, channels or Channels(), sources, enter_nicely)
        self._marks = {executor: new_mark() for executor in self._workers}
        self._logs: dict[ExecutorId, Any] = {name: self._log.bind(executor=name) for name in self._workers}
        self._network, self._read, self._max_pixels, self._clock = infer, read, max_pixels, clock

    def run(self, batch: Batch, done: Callable[[Batch], None]) -> None:
        self._workers[batch.executor].give_order(lambda: self._run(batch, done))

    def _run(self, batch: Batch, done: Callable[[Batch], None]) -> None:
        batch.started_s = self._clock()
        try:
            self._answer(batch)
        except Exception as error:  # noqa: BLE001  the drive must learn that this batch is over
            if not isinstance(error, _AbandonedError):
                self._logs[batch.executor].exception("batch_failed", expert=batch.spec.name, images=len(batch.images))
            batch.fail(_text(error))
            batch.device_error = _text(error) if is_device_error(error) else None
        batch.ended_s = self._clock()
        done(batch)

    def _answer(self, batch: Batch) -> None:
        prepared = self._prepare(batch)
        _raise_if_abandoned(batch)
        slot = self.slots.slot(batch.spec.expert)
        if slot.spec != batch.spec:
            raise ExpertError(batch.spec.expert, "other weights are resident than the catalog names; reload it again")
        begin_s = self._clock()
        self._infer(slot, batch, prepared, tuple(prepared))
        batch.infer_ms = (self._clock() - begin_s) * 1000.0

    def _prepare(self, batch: Batch) -> dict[int, Prepared]:
        prepared: dict[int, Prepared] = {}
        for number, image in enumerate(batch.images):
            try:
                each = prepared[number] = self._prepare_one(batch, number, image)
                batch.sizes[number] = each.width, each.height
            except ImageError as error:
                batch.answers[number] = Fault("bad_image", error.reason)
            except JournalError as error:
                fault = batch.answers[number] = Fault.from_unread(error)
                if fault.kind == "bad_image":
                    where = {"segment": error.segment, "offset": error.offset}
                    self._logs[batch.executor].error("image_damaged", **where, reason=error.reason)
            except _AbandonedError:
                raise
            except Exception as error:  # noqa: BLE001  a hostile image costs one image
                where = {"segment": image.key.segment, "offset": image.key.offset}
                self._logs[batch.executor].exception("image_failed", **where)
                batch.answers[number] = Fault("bad_image", _text(error))
        return prepared

    def _prepare_one(self, batch: Batch, number: int, image: StoredImage) -> Prepared:
        payload, mark = self._read(image.key), self._marks[batch.executor]
        _raise_if_abandoned(batch)
        batch.decoding = number
        mark(image.key)
        try:
            return prepare(payload, image.pixels.encoding, image.pixels.shape, batch.spec, self._max_pixels)
        finally:
            batch.decoding = None
            if not batch.is_abandoned:  # else the mark belongs to the thread that took over
                mark(None)

    def _infer(self, slot: Slot, batch: Batch, prepared: dict[int, Prepared], chosen: tuple[int, ...]) -> None:
        """Answer the images `chosen`: in halves after running out of memory, one by one after another error.

        A device error ends the batch: no image caused it, and it would repeat for each.
        """
        if not chosen:
            return
        try:
            images = [prepared[number] for number in chosen]
            answers = self._network(slot, images, [batch.expert_of(number) for number in chosen])
        except Exception as error:  # noqa: BLE001  an error of the network costs one image
            if is_device_error(error):
                batch.device_error = _text(error)
            if len(chosen) == 1 or batch.device_error is not None:
                log = self._logs[batch.executor]
                log.warning("inference_failed", expert=slot.spec.name, error=_text(error))
                for number in chosen:
                    batch.answers[number] = Fault("expert_failed", _text(error))
                return
            middle = len(chosen) // 2
            if ran_out_of_memory(error):
                batch.memory_limit = min(middle, batch.memory_limit or middle)
                parts = [chosen[:middle], chosen[middle:]]
            else:
                parts = [(number,) for number in chosen]
        else:
            for number, answer in zip(chosen, answers, strict=True):
                batch.answers[number] = _checked(answer)
            return
        # Outside the handler: while the error is being handled it holds the failed batch's tensors.
        for part in parts:
            self._infer(slot, batch, prepared, part)


def device_pools(
    facts: Sequence[PoolFacts],
    executors: Sequence[ExecutorFacts],
    slots: Mapping[PoolId, Slots],
    infer: Callable[[Any, Sequence[Prepared], Sequence[ExpertSpec]], Sequence[Answer | ExpertError]],
    read: Read,
    new_mark: Callable[[], Mark],
    max_pixels: int,
    enter: Callable[[PoolId], None] = lambda _pool: None,
) -> list[DevicePool]:
    """Return the pools of one machine, which share its channels and copy from each other's `slots`."""
    channels = Channels()
    return [
        DevicePool(
            pool,
            [each.executor for each in executors if each.pool == pool],
            slots[pool],
            infer,
            read,
            channels=channels,
            sources=slots,
            enter=lambda pool=pool: enter(pool),
            new_mark=new_mark,
            max_pixels=max_pixels,
        )
        for pool in (each.pool for each in facts)
    ]


def _raise_if_abandoned(batch: Batch) -> None:
    if batch.is_abandoned:
        raise _AbandonedError("this batch took too long and was given up")


def is_finite(answer: Answer) -> bool:
    numbers = [number for box in answer.detections for number in (box.confidence, *box.box)]
    return all(map(math.isfinite, numbers if answer.confidence is None else [answer.confidence, *numbers]))


def _checked(answer: Answer | ExpertError) -> Answer | Fault:
    if isinstance(answer, ExpertError):
        return Fault("expert_failed", str(answer))
    return answer if is_finite(answer) else Fault("expert_failed", _NOT_NUMBERS)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
