"""How an expert comes into a slot and when computing may read it: in host memory, and by way of pinned memory on CUDA.

Calls of `bring` never overlap (the cache has one channel). In host memory they return when the last byte is there. On a
GPU they return when the copy has been *given* to the communication stream: the computing stream waits for its event
(`arrive`), the next copy into the slot waits for the event behind the kernels that read it (`leave`), and no thread
waits for either.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import psutil
import torch

from experts.ledger import Ledger
from experts.memory import HostMemory
from experts.moe.gating import ExpertKey
from experts.moe.weights.expert_store import ExpertStore
from experts.spec import ExpertId
from experts.transfer import HostTransfer, Place, Transfer, transfer_for


class WeightTransfer(Protocol):
    """One device's way from the file into slots."""

    def allocate(self) -> Place:
        """Memory of one slot. Raises MemoryError, RuntimeError, OSError where there is none left."""
        ...

    def retire(self, place: Place) -> None:
        """Give a slot's memory back, once nothing reads it any more. Views of it stay."""
        ...

    def restore(self, place: Place) -> None:
        """Memory again for a retired slot. Raises as `allocate`."""
        ...

    def bring(self, key: ExpertKey, place: Place) -> None:
        """Fill the slot. Raises ModelError; the slot then holds nothing."""
        ...

    def arrive(self, place: Place, *, late: bool) -> None:
        """What this thread computes from now on reads the slot after it is filled; `late`: it has waited already."""
        ...

    def leave(self, place: Place) -> None:
        """What this thread has been computing was the last to read the slot."""
        ...

    def waits(self) -> list[tuple[float, bool]]:
        """Seconds for which the device stood still at each `arrive`, with its `late`, where known and not yet told."""
        ...


def weight_transfer_for(store: ExpertStore, device: str, ram_bytes: int | None = None) -> WeightTransfer:
    """For "cpu" or "cuda:N"; `ram_bytes` of pinned memory keep experts between file and GPU."""
    transfer = transfer_for(device)
    if transfer.device.type == "cpu":
        return HostWeightTransfer(store, transfer)
    if ram_bytes is None:
        ram_bytes = min(len(store.arch.keys()) * store.expert_bytes, psutil.virtual_memory().available // 2)
    tier = PinnedTier(store, ram_bytes, HostTransfer(pin=True))
    return DeviceWeightTransfer(store.expert_bytes, transfer, tier, CudaCopyStreams(transfer.device))


class HostWeightTransfer:
    """Slots in host memory, each filled straight from the file."""

    def __init__(self, store: ExpertStore, transfer: Transfer) -> None:
        self._store = store
        self._transfer = transfer

    def allocate(self) -> Place:
        return self._transfer.allocate(self._store.expert_bytes)

    def retire(self, place: Place) -> None:
        self._transfer.vacate(place)

    def restore(self, place: Place) -> None:
        self._transfer.occupy(place)

    def bring(self, key: ExpertKey, place: Place) -> None:
        self._store.read(key, _memory(place).view)

    def arrive(self, place: Place, *, late: bool) -> None:
        pass

    def leave(self, place: Place) -> None:
        pass

    def waits(self) -> list[tuple[float, bool]]:
        return []


#: A point in a stream's work; on CUDA a torch.cuda.Event.
StreamEvent = Any


class CopyStreams(Protocol):
    """A communication stream beside the stream that a thread computes on."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: StreamEvent | None) -> StreamEvent:
        """Start a copy that begins once `after` has come to pass; the mark of its end."""
        ...

    def mark(self) -> StreamEvent:
        """Everything that this thread has given its computing stream so far."""
        ...

    def join(self, mark: StreamEvent, *, late: bool) -> None:
        """What this thread computes from now on begins once the mark has come to pass. The thread goes on."""
        ...

    def settle(self, mark: StreamEvent) -> None:
        """Block this thread until the mark has come to pass."""
        ...

    def waits(self) -> list[tuple[float, bool]]:
        """Seconds between the two sides of each `join` that waited, with its `late`, where known and not yet told."""
        ...


class CudaCopyStreams:
    """One communication stream of a GPU; threads compute on whatever stream is current for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event, bool]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: StreamEvent | None) -> StreamEvent:
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done.record(self._stream)
        return done

    def mark(self) -> StreamEvent:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self, mark: StreamEvent, *, late: bool) -> None:
        if mark.query():
            return
        stream = torch.cuda.current_stream(self._device)
        before, behind = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(mark)
        behind.record(stream)
        self._waits.append((before, behind, late))

    def settle(self, mark: StreamEvent) -> None:
        mark.synchronize()

    def waits(self) -> list[tuple[float, bool]]:
        known: list[tuple[float, bool]] = []
        while self._waits and self._waits[0][1].query():  # in the order of the stream
            before, behind, late = self._waits.pop(0)
            known.append((before.elapsed_time(behind) / 1000, late))
        return known


@dataclass(eq=False, slots=True)
class _Page:
    """One expert's host memory, and the copy out of it that was started last."""

    place: Place
    copied: StreamEvent | None = None


class PinnedTier:
    """Experts in host memory between the file and a GPU, the one used longest ago replaced first.

    Two are the least: one is copied on while the next one is read.
    """

    def __init__(self, store: ExpertStore, budget_bytes: int, transfer: Transfer) -> None:
        self._store = store
        self._transfer = transfer
        self.ledger = Ledger("ram", max(budget_bytes, 2 * store.expert_bytes))
        self._pages: dict[ExpertKey, _Page] = {}
        self._spare: list[_Page] = []

    def page(self, key: ExpertKey, settle: Callable[[StreamEvent], None]) -> _Page:
        """The page that holds an expert, read from the file if need be. Raises ModelError, MemoryError."""
        page = self._pages.pop(key, None)
        if page is None:
            page = self._empty()
            self.ledger.begin_load(_name(key), self._store.expert_bytes)
            try:
                if page.copied is not None:
                    settle(page.copied)  # the GPU may still be reading what the file is about to overwrite
                self._store.read(key, _memory(page.place).view)
            except BaseException:
                self.ledger.abandon_load(_name(key))
                self._spare.append(page)
                raise
            self.ledger.finish_load(_name(key))
        self._pages[key] = page
        return page

    def _empty(self) -> _Page:
        if self._spare:
            return self._spare.pop()
        if self.ledger.free_bytes >= self._store.expert_bytes:
            return _Page(self._transfer.allocate(self._store.expert_bytes))
        oldest = next(iter(self._pages))
        self.ledger.evict(_name(oldest))
        return self._pages.pop(oldest)


@dataclass(slots=True)
class _Turns:
    """The last copy into a slot, and the last computing out of it."""

    copied: StreamEvent | None = None
    computed: StreamEvent | None = None


class DeviceWeightTransfer:
    """Slots that the host cannot write itself, filled from pinned memory on a communication stream."""

    def __init__(self, expert_bytes: int, transfer: Transfer, tier: PinnedTier, streams: CopyStreams) -> None:
        self._expert_bytes = expert_bytes
        self._transfer = transfer
        self._tier = tier
        self._streams = streams
        self._turns: dict[int, _Turns] = {}

    def allocate(self) -> Place:
        place = self._transfer.allocate(self._expert_bytes)
        # The allocator hands memory out in the order of this thread's stream: what is before must be done first.
        self._turns[id(place)] = _Turns(computed=self._streams.mark())
        return place

    def retire(self, place: Place) -> None:
        turns = self._turns[id(place)]
        for mark in (turns.copied, turns.computed):
            if mark is not None:
                self._streams.settle(mark)
        self._transfer.vacate(place)

    def restore(self, place: Place) -> None:
        self._transfer.occupy(place)
        self._turns[id(place)] = _Turns(computed=self._streams.mark())

    def bring(self, key: ExpertKey, place: Place) -> None:
        turns = self._turns[id(place)]
        page = self._tier.page(key, self._streams.settle)
        page.copied = turns.copied = self._streams.copy(place.buffer, _memory(page.place).tensor, turns.computed)
        turns.computed = None

    def arrive(self, place: Place, *, late: bool) -> None:
        copied = self._turns[id(place)].copied
        if copied is not None:
            self._streams.join(copied, late=late)

    def leave(self, place: Place) -> None:
        self._turns[id(place)].computed = self._streams.mark()

    def waits(self) -> list[tuple[float, bool]]:
        return self._streams.waits()


def _name(key: ExpertKey) -> ExpertId:
    return ExpertId(f"{key.layer}.{key.expert}")


def _memory(place: Place) -> HostMemory:
    if place.memory is None:
        raise TypeError("this place is not in host memory")
    return place.memory
