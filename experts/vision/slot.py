"""Slots and pools: preallocated places on a device that experts pass through.

A slot is a place in memory and a module whose parameters are views into it. Loading an expert is one read, or one copy
from another pool, into a slot of its layout. Slots are never thrown away: one that makes room for another layout gives
its memory back and keeps its module, so that a pool that has seen its mix of layouts makes nothing more.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from experts.errors import ExpertError, WeightsError
from experts.reading import CachedReader, FileReader, RegionHash
from experts.spec import ExpertId, ExpertSpec, LayoutId, LoadReport
from experts.transfer import DeviceTransfer, SlotMemory, transfer_for
from experts.vision.graphs import GraphedNetwork, Recorders
from experts.vision.layouts import Layout, build_layout
from experts.vision.networks import runs_fused
from experts.vision.packing import PackingNetwork
from experts.weights import WeightsHeader, check_digest, describe_os_error, open_weights, read_header_from

#: As many at a time are asked whether they are finite numbers.
_CHECKED_WEIGHTS = 4 << 20


@dataclass(eq=False, slots=True)
class Slot:
    """A place of one layout. `spec` is the expert in it; a slot that is kept free keeps its last one."""

    spec: ExpertSpec
    layout: Layout = field(repr=False)
    place: SlotMemory = field(repr=False)
    module: nn.Module = field(repr=False)
    transfer: DeviceTransfer = field(repr=False)

    @property
    def buffer(self) -> torch.Tensor:
        return self.place.buffer

    @property
    def size_bytes(self) -> int:
        return self.layout.region_bytes


@dataclass(slots=True)
class LayoutShelf:
    """Shared by the pools of one process: layouts by name, built once, hashes of weights, recorders of batches.

    `hashes` has the keyed hash of each region whose file had its sha256: later loads check that, which is faster.
    `packs`: the CPU's networks pack weights (packing.py), because no pool copies experts from the CPU's. A function may
    replace `transfer_for`.
    """

    hashes: dict[tuple[str, ...], bytes] = field(default_factory=dict, repr=False)
    key: bytes = field(default_factory=lambda: os.urandom(16), repr=False)
    recorders: Recorders = field(default_factory=Recorders)
    transfers: Callable[[str], DeviceTransfer] | None = None
    packs: bool = False
    _layouts: dict[LayoutId, Layout] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, spec: ExpertSpec) -> Layout:
        with self._lock:
            layout = self._layouts.get(spec.layout)
            if layout is None:
                try:
                    layout = build_layout(spec.layout, self.recorders)
                except (KeyError, ValueError) as error:
                    message = "its weights file is missing or damaged: `coserve check` says more; correct it and reload"
                    raise ExpertError(spec.expert, message, spec.file) from error
                self._layouts[spec.layout] = layout
            return layout


class NoModule(nn.Module):
    """Takes the place of the module in a pool that only keeps bytes."""

    def forward(self, *_: object) -> torch.Tensor:
        raise TypeError("experts in the RAM tier cannot run; load them to a device")


class SlotPool:
    """The experts resident on one device, never above `budget_bytes`, kept free slots included.

    `device` is "cpu", "cuda:N", or "ram": host memory that other pools load from and nothing runs in. Loader threads
    call `load` and `unload`, executors `slot`; the caller must not evict an expert in use. The lock covers the books
    and giving memory back, so that no byte is owned twice; never a read.
    """

    def __init__(
        self, device: str, budget_bytes: int, shelf: LayoutShelf | None = None, reader: FileReader | None = None
    ) -> None:
        self.device = device
        self._shelf = shelf or LayoutShelf()
        self.transfer = (self._shelf.transfers or transfer_for)(device)
        self._budget_bytes = budget_bytes
        self._reader = reader or CachedReader()
        self._packs = device == "cpu" and self._shelf.packs
        self._no_module = NoModule() if device == "ram" else None
        self._resident: dict[ExpertId, Slot] = {}
        self._filling: dict[ExpertId, Slot] = {}
        self._reserved: dict[ExpertId, int] = {}
        self._kept: list[Slot] = []
        self._vacant: list[Slot] = []
        self._lock = threading.Lock()

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used_bytes()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots, those kept free for reuse included; never above the budget."""
        with self._lock:
            return self._used_bytes() + self._kept_bytes()

    def resident(self) -> tuple[ExpertId, ...]:
        with self._lock:
            return tuple(self._resident)

    def slot(self, expert: ExpertId) -> Slot:
        """Return the slot of a resident expert. Raises ExpertError if it is not resident."""
        with self._lock:
            slot = self._resident.get(expert)
        if slot is None:
            raise ExpertError(expert, f"is not resident on {self.device}")
        return slot

    def load(self, spec: ExpertSpec, evict: tuple[ExpertId, ...] = (), source: "SlotPool | None" = None) -> LoadReport:
        """Evict, then fill a slot: from the slot in `source`, which keeps it meanwhile, or from the expert's file.

        If `source` holds other weights than `spec` names (replaced on disk since), the file is read. Raises
        ExpertError; what was evicted stays evicted.
        """
        begin = time.perf_counter()
        with self._lock:
            for expert in evict:
                if expert in self._resident:
                    self._kept.append(self._resident.pop(expert))
        slot = self._take(spec, self._shelf.get(spec))
        try:
            if isinstance(slot.module, PackingNetwork):
                slot.module.forget()
            copied = source is not None and self._copy(slot, spec, source)
            if not copied:
                self._fill(slot, spec)
        except BaseException:
            with self._lock:
                self._kept.append(self._filling.pop(spec.expert))
            raise
        slot.spec = spec
        with self._lock:
            self._resident[spec.expert] = self._filling.pop(spec.expert)
        moved_bytes = slot.size_bytes if copied else slot.layout.form(spec.stored_as).region_bytes
        return LoadReport(moved_bytes, (time.perf_counter() - begin) * 1e3, "ram" if copied else "disk")

    def unload(self, expert: ExpertId) -> None:
        """Give up an expert; its slot is kept for the next of its layout while the budget allows."""
        with self._lock:
            slot = self._resident.pop(expert, None)
            if slot is None:
                raise ExpertError(expert, f"is not resident on {self.device}")
            self._kept.append(slot)
            self._trim(self._budget_bytes)

    def resize(self, budget_bytes: int) -> None:
        """Raises ValueError if resident experts exceed the new budget: unload some first."""
        with self._lock:
            if self._used_bytes() > budget_bytes:
                raise ValueError(f"{self.device} holds {self._used_bytes()} bytes of experts; unload some first")
            self._budget_bytes = budget_bytes
            self._trim(budget_bytes)

    def _take(self, spec: ExpertSpec, layout: Layout) -> Slot:
        """Return a slot for the expert, its bytes accounted for. Memory and modules are made outside the lock."""
        with self._lock:
            if spec.expert in self._resident or spec.expert in self._filling or spec.expert in self._reserved:
                raise ExpertError(spec.expert, f"is already in the pool of {self.device}")
            slot = _pop(self._kept, layout)
            if slot is not None:
                self._filling[spec.expert] = slot
                return slot
            self._make_room(spec, layout.region_bytes)
            self._reserved[spec.expert] = layout.region_bytes
            vacant = _pop(self._vacant, layout)
        try:
            slot = self._allocate(spec, layout, vacant)
        except BaseException:
            with self._lock:
                del self._reserved[spec.expert]
                if vacant is not None:
                    self._vacant.append(vacant)
            raise
        with self._lock:
            del self._reserved[spec.expert]
            self._filling[spec.expert] = slot
        return slot

    def _make_room(self, spec: ExpertSpec, size_bytes: int) -> None:
        self._trim(self._budget_bytes - size_bytes)
        free_bytes = self._budget_bytes - self._used_bytes()
        if size_bytes > free_bytes:
            message = f"needs {size_bytes} bytes on {self.device}, where {free_bytes} are free"
            raise ExpertError(spec.expert, f"{message}; raise the device's budget or evict more experts")

    def _allocate(self, spec: ExpertSpec, layout: Layout, vacant: Slot | None) -> Slot:
        """Allocate a slot, or memory for one that had given its own back."""
        try:
            if vacant is not None:
                self.transfer.occupy(vacant.place)
                return vacant
            place = self.transfer.allocate(layout.region_bytes)
        except (RuntimeError, MemoryError, OSError) as error:
            message = f"{self.device} has no {layout.region_bytes} bytes left; lower the device's budget"
            raise ExpertError(spec.expert, message) from error
        return Slot(spec, layout, place, self._no_module or self._bind(layout, place), self.transfer)

    def _bind(self, layout: Layout, place: SlotMemory) -> nn.Module:
        module, memory = layout.bind(place.buffer), place.memory
        if not self._packs or memory is None or not runs_fused(layout.dtype):
            return module
        begin = place.buffer.data_ptr()
        return PackingNetwork(module, lambda weights: memory.discard(weights.data_ptr() - begin, weights.nbytes))

    def _trim(self, limit_bytes: int) -> None:
        """Take the memory of slots that are kept free, longest kept first, until all slots fit `limit_bytes`."""
        while self._kept and self._used_bytes() + self._kept_bytes() > limit_bytes:
            slot = self._kept.pop(0)
            if isinstance(slot.module, (GraphedNetwork, PackingNetwork)):
                slot.module.forget()  # its next memory may be elsewhere; a replay would read what lies here by then
            self.transfer.vacate(slot.place)
            self._vacant.append(slot)

    def _used_bytes(self) -> int:
        slots = (*self._resident.values(), *self._filling.values())
        return sum(slot.size_bytes for slot in slots) + sum(self._reserved.values())

    def _kept_bytes(self) -> int:
        return sum(slot.size_bytes for slot in self._kept)

    def _copy(self, slot: Slot, spec: ExpertSpec, source: "SlotPool") -> bool:
        """Copy another pool's slot of the same weights; False if it holds others."""
        origin = source.slot(spec.expert)
        if (origin.spec.sha256, origin.spec.layout) != (spec.sha256, spec.layout):
            return False
        if origin.place.memory is not None:
            self.transfer.copy(slot.place, origin.place.memory)
        elif slot.place.memory is not None:
            source.transfer.copy_out(origin.place, slot.place.memory)
        else:
            raise ExpertError(
                spec.expert, f"cannot be copied from {source.device} to {self.device}, only by way of ram"
            )
        return True

    def _fill(self, slot: Slot, spec: ExpertSpec) -> None:
        """Read the file's region into the slot, and check these bytes: by the keyed hash, else by the sha256."""
        try:
            descriptor = self._reader.open(spec.file)
        except OSError as error:
            raise ExpertError(spec.expert, describe_os_error(error), spec.file) from error
        form = slot.layout.form(spec.stored_as)
        known_as = (spec.sha256, spec.layout, spec.stored_as)

        def fill(begin: int, on_bytes: Callable[[memoryview], object] = lambda _: None) -> bytes:
            keyed = RegionHash(self._shelf.key)
            self.transfer.fill(slot.place, keyed.read(partial(self._reader.read, descriptor), begin, on_bytes), form)
            return keyed.value()

        try:
            begin, known = os.fstat(descriptor).st_size - form.region_bytes, self._shelf.hashes.get(known_as)
            if known is not None and begin >= 0 and fill(begin) == known:
                return  # else the checks below say what is wrong with the file
            head = _checked_head(spec, slot.layout)
            digest = hashlib.sha256(head)
            keyed = fill(len(head), digest.update)
            check_digest(digest.hexdigest(), spec)
            _check_finite(slot, spec)
            self._shelf.hashes[known_as] = keyed
        except WeightsError as error:
            raise ExpertError(spec.expert, error.message, spec.file) from error
        except EOFError as error:
            raise ExpertError(spec.expert, f"{error}; import the expert again", spec.file) from error
        except OSError as error:
            raise ExpertError(spec.expert, describe_os_error(error), spec.file) from error
        except torch.OutOfMemoryError as error:
            message = f"{self.device} has no memory left to check weights in; lower the device's budget"
            raise ExpertError(spec.expert, message) from error
        finally:
            os.close(descriptor)


def loaded_slot(spec: ExpertSpec, device: str = "cpu") -> Slot:
    """Return the network of an expert in a pool of its own. Raises ExpertError."""
    pool = SlotPool(device, spec.resident.weights_bytes)
    pool.load(spec.resident)
    return pool.slot(spec.resident.expert)


def _check_finite(slot: Slot, spec: ExpertSpec) -> None:
    """Refuse weights that are not finite: fused activations turn NaN into zero, so that answers would look sound.

    Piece by piece: checking all at once takes more memory on the device than the weights do.
    """
    for entry in slot.layout.entries:
        for piece in slot.buffer[entry.begin : entry.end].view(slot.layout.dtype).split(_CHECKED_WEIGHTS):
            if not bool(piece.isfinite().all()):
                what = f"weights or scales in {entry.name}" if spec.stored_as else f"weights in {entry.name}"
                raise WeightsError(
                    spec.file, f"holds {what} that are not finite numbers; train or import the expert again"
                )


def _pop(slots: list[Slot], layout: Layout) -> Slot | None:
    """Take the last slot of a layout, the likeliest to be in the processor's caches."""
    for index in range(len(slots) - 1, -1, -1):
        if slots[index].layout is layout:
            return slots.pop(index)
    return None


def _checked_head(spec: ExpertSpec, layout: Layout) -> bytes:
    """Return the bytes before the region, read separately, since the pool's reader may be unbuffered.

    If the file is replaced at this moment, head and region are of two files and the sha256 differs.
    """
    with open_weights(spec.file) as file:
        header = read_header_from(file.fileno(), spec.file)
        _check_header(header, layout, spec)
        return os.pread(file.fileno(), header.data_start, 0)


def _check_header(header: WeightsHeader, layout: Layout, spec: ExpertSpec) -> None:
    name = header.metadata.get("layout")
    if name != layout.layout:
        raise WeightsError(spec.file, f"has the layout {name}, the catalog said {layout.layout}; reload the catalog")
    if header.stored_as != spec.stored_as:
        forms = f"stores its weights as {header.stored_as or 'computed'}, not as {spec.stored_as or 'computed'}"
        raise WeightsError(spec.file, f"{forms}; reload the catalog")
    form = layout.form(spec.stored_as)
    if header.entries != form.entries or header.region_bytes != form.region_bytes:
        message = "holds its tensors in another order than this version needs; import the expert again"
        raise WeightsError(spec.file, message)
