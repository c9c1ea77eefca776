"""Transfer of experts' weights into slots, in host memory or through pinned memory on CUDA, ordered with computing.

Calls of `fill` never overlap (the cache has one channel). In host memory they return when the last byte is there. On a
GPU they return when the copy is queued on the communication stream: the computing stream waits for its event
(`begin_use`), the next copy into the slot for the event behind the kernels that read it (`end_use`); no thread waits.
"""

from dataclasses import dataclass
from typing import Any

import psutil
import torch

from experts.moe.gating import ExpertKey
from experts.moe.weights.checkpoint import ExpertStore
from experts.transfer import DeviceTransfer, HostTransfer, SlotMemory, transfer_for


def weight_transfer_for(store: ExpertStore, device: str) -> "WeightTransfer":
    """Return the transfer for "cpu" or "cuda:N"; pinned memory keeps experts between file and GPU."""
    transfer = transfer_for(device)
    if transfer.device.type == "cpu":
        return WeightTransfer(store, transfer)
    ram_bytes = min(len(store.arch.expert_keys) * store.expert_bytes, psutil.virtual_memory().available // 2)
    tier = PinnedTier(store, ram_bytes, HostTransfer(pin=True))
    return DeviceWeightTransfer(store, transfer, tier, CudaCopyStreams(transfer.device))


class WeightTransfer:
    """Transfer from the files into the slots of one device; here host memory, filled directly."""

    def __init__(self, store: ExpertStore, transfer: DeviceTransfer) -> None:
        self._store = store
        self._transfer = transfer

    def allocate(self) -> SlotMemory:
        """Allocate one slot. Raises MemoryError, RuntimeError or OSError if no memory is left."""
        return self._transfer.allocate(self._store.expert_bytes)

    def retire(self, place: SlotMemory) -> None:
        """Give a slot's memory back, although views of it may stay, once nothing reads it any more."""
        self._transfer.vacate(place)

    def fill(self, key: ExpertKey, place: SlotMemory) -> None:
        """Raises ModelError; the slot is then empty."""
        self._store.read(key, place.host.view)

    def begin_use(self, place: SlotMemory) -> None:
        """Order this thread's computing after the slot's fill."""

    def end_use(self, place: SlotMemory) -> None:
        """Order the slot's next fill after this thread's computing so far."""


#: A point in a stream's work; on CUDA a torch.cuda.Event.
StreamEvent = Any


class CudaCopyStreams:
    """One communication stream of a GPU; threads compute on their current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: StreamEvent | None) -> StreamEvent:
        """Queue a copy behind the event `after`; return the event of its end."""
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done.record(self._stream)
        return done

    def record(self) -> StreamEvent:
        """Return an event behind everything that this thread has queued on its computing stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_event(self, event: StreamEvent) -> None:
        """Let this thread's computing stream, not the thread, wait for the event."""
        torch.cuda.current_stream(self._device).wait_event(event)


@dataclass(eq=False, slots=True)
class _Page:
    place: SlotMemory
    copied: StreamEvent | None = None


class PinnedTier:
    """Experts in host memory, the least recently used replaced first; at least two: one is copied, the next is read."""

    def __init__(self, store: ExpertStore, budget_bytes: int, transfer: DeviceTransfer) -> None:
        self._store = store
        self._transfer = transfer
        self._most_pages = max(2, budget_bytes // store.expert_bytes)
        self._pages: dict[ExpertKey, _Page] = {}

    def page(self, key: ExpertKey) -> _Page:
        """Return an expert's page, read from the file if needed. Raises ModelError, MemoryError."""
        page = self._pages.pop(key, None)
        if page is None:
            page = self._empty()
            if page.copied is not None:
                page.copied.synchronize()  # the GPU may still be reading the page
            self._store.read(key, page.place.host.view)
        self._pages[key] = page
        return page

    def _empty(self) -> _Page:
        if len(self._pages) < self._most_pages:
            return _Page(self._transfer.allocate(self._store.expert_bytes))
        return self._pages.pop(next(iter(self._pages)))


@dataclass(slots=True)
class _SlotEvents:
    copied: StreamEvent | None = None
    computed: StreamEvent | None = None


class DeviceWeightTransfer(WeightTransfer):
    """Slots that the host cannot write, filled from pinned memory on a communication stream."""

    def __init__(
        self, store: ExpertStore, transfer: DeviceTransfer, tier: PinnedTier, streams: CudaCopyStreams
    ) -> None:
        super().__init__(store, transfer)
        self._tier = tier
        self._streams = streams
        self._events: dict[int, _SlotEvents] = {}

    def allocate(self) -> SlotMemory:
        place = super().allocate()
        # The allocator hands memory out in the order of this thread's stream: earlier work must be done first.
        self._events[id(place)] = _SlotEvents(computed=self._streams.record())
        return place

    def retire(self, place: SlotMemory) -> None:
        events = self._events.pop(id(place))
        for event in (events.copied, events.computed):
            if event is not None:
                event.synchronize()
        super().retire(place)

    def fill(self, key: ExpertKey, place: SlotMemory) -> None:
        events = self._events[id(place)]
        page = self._tier.page(key)
        page.copied = events.copied = self._streams.copy(place.buffer, page.place.host.tensor, events.computed)
        events.computed = None

    def begin_use(self, place: SlotMemory) -> None:
        copied = self._events[id(place)].copied
        if copied is not None:
            self._streams.wait_event(copied)

    def end_use(self, place: SlotMemory) -> None:
        self._events[id(place)].computed = self._streams.record()
