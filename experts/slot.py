"""Slots and pools: preallocated places on a device that experts pass through.

A slot is a buffer and a module whose parameters are views into it. Loading an expert is one read into the buffer of a
slot of its layout; modules are made only when a pool gets another slot, never when it reuses one.
"""

import hashlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from experts.errors import ExpertError, WeightsError
from experts.spec import ExpertId, ExpertSpec, LayoutId
from experts.transfer import Transfer, transfer_for
from experts.vision.layouts import Layout, build_layout
from experts.weights import Header, check_digest, describe_os_error, read_header_from


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One expert switch: bytes moved, milliseconds, and where they came from."""

    bytes: int
    load_ms: float
    tier: Literal["ram", "disk"]


@dataclass(eq=False, slots=True)
class Slot:
    """A place of one layout. `spec` is the expert in it; a slot that is kept free keeps its last one."""

    spec: ExpertSpec
    layout: Layout = field(repr=False)
    buffer: torch.Tensor = field(repr=False)
    module: nn.Module = field(repr=False)
    transfer: Transfer = field(repr=False)

    @property
    def size_bytes(self) -> int:
        return self.layout.region_bytes


@dataclass(slots=True)
class LayoutShelf:
    """Layouts by name, built once each; pools of one process may share it."""

    _layouts: dict[LayoutId, Layout] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, spec: ExpertSpec) -> Layout:
        with self._lock:
            layout = self._layouts.get(spec.layout)
            if layout is None:
                try:
                    layout = build_layout(spec.layout)
                except (KeyError, ValueError) as error:
                    message = "its weights file could not be read when the catalog was; correct it and reload"
                    raise ExpertError(spec.expert, message, spec.file) from error
                self._layouts[spec.layout] = layout
            return layout


class SlotPool:
    """The experts resident on one device, never above `budget_bytes`, kept free slots included.

    `load` and `unload` are called by loader threads, `slot` by executors; evicting an expert that is in use is the
    caller's mistake to avoid. Only bookkeeping is locked, never a read.
    """

    def __init__(self, device: str, budget_bytes: int, shelf: LayoutShelf | None = None) -> None:
        self.device = device
        self._transfer = transfer_for(device)
        self._budget_bytes = budget_bytes
        self._shelf = shelf or LayoutShelf()
        self._resident: dict[ExpertId, Slot] = {}
        self._filling: dict[ExpertId, Slot] = {}
        self._kept: list[Slot] = []
        self._verified: dict[Path, tuple[object, ...]] = {}
        self._lock = threading.Lock()

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of experts resident or being loaded."""
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
        """The slot of a resident expert. Raises ExpertError if it is not resident."""
        with self._lock:
            slot = self._resident.get(expert)
        if slot is None:
            raise ExpertError(expert, f"is not resident on {self.device}")
        return slot

    def load(self, spec: ExpertSpec, evict: tuple[ExpertId, ...] = ()) -> LoadReport:
        """Evict, then fill a slot from the expert's file. Raises ExpertError; what was evicted stays evicted."""
        begin = time.perf_counter()
        with self._lock:
            for expert in evict:
                if expert in self._resident:
                    self._kept.append(self._resident.pop(expert))
        slot = self._take(spec, self._shelf.get(spec))
        try:
            self._fill(slot, spec)
        except BaseException:
            with self._lock:
                self._kept.append(self._filling.pop(spec.expert))
            raise
        slot.spec = spec
        with self._lock:
            self._resident[spec.expert] = self._filling.pop(spec.expert)
        return LoadReport(slot.size_bytes, (time.perf_counter() - begin) * 1e3, "disk")

    def unload(self, expert: ExpertId) -> None:
        """Give up an expert; its slot is kept for the next of its layout while the budget allows."""
        with self._lock:
            slot = self._resident.pop(expert, None)
            if slot is None:
                raise ExpertError(expert, f"is not resident on {self.device}")
            self._kept.append(slot)
            self._trim(self._budget_bytes)

    def resize(self, budget_bytes: int) -> None:
        """A new budget. Raises ValueError where resident experts exceed it: unload some first."""
        with self._lock:
            if self._used_bytes() > budget_bytes:
                raise ValueError(f"{self.device} holds {self._used_bytes()} bytes of experts; unload some first")
            self._budget_bytes = budget_bytes
            self._trim(budget_bytes)

    def check(self) -> None:
        """Assert that the books agree: for tests and for idle moments."""
        with self._lock:
            slots = [*self._resident.values(), *self._filling.values(), *self._kept]
            _require(len({id(slot.buffer) for slot in slots}) == len(slots), "one buffer serves two slots")
            _require(not self._resident.keys() & self._filling.keys(), "an expert is resident and loading")
            for expert, slot in self._resident.items():
                _require(slot.spec.expert == expert, f"the slot of {expert} holds {slot.spec.expert}")
                _require(slot.buffer.numel() == slot.size_bytes, f"the slot of {expert} has another size")
            _require(self._used_bytes() + self._kept_bytes() <= self._budget_bytes, "the pool is over its budget")

    def _take(self, spec: ExpertSpec, layout: Layout) -> Slot:
        with self._lock:
            if spec.expert in self._resident or spec.expert in self._filling:
                raise ExpertError(spec.expert, f"is already in the pool of {self.device}")
            slot = next((kept for kept in self._kept if kept.layout is layout), None)
            if slot is not None:
                self._kept.remove(slot)
            else:
                slot = self._new_slot(spec, layout)
            self._filling[spec.expert] = slot
            return slot

    def _new_slot(self, spec: ExpertSpec, layout: Layout) -> Slot:
        self._trim(self._budget_bytes - layout.region_bytes)
        free_bytes = self._budget_bytes - self._used_bytes()
        if layout.region_bytes > free_bytes:
            message = f"needs {layout.region_bytes} bytes on {self.device}, where {free_bytes} are free"
            raise ExpertError(spec.expert, f"{message}; raise the device's budget or evict more experts")
        try:
            buffer = self._transfer.allocate(layout.region_bytes)
        except (RuntimeError, MemoryError) as error:
            message = f"{self.device} has no {layout.region_bytes} bytes left; lower the device's budget"
            raise ExpertError(spec.expert, message) from error
        return Slot(spec, layout, buffer, layout.bind(buffer), self._transfer)

    def _trim(self, limit_bytes: int) -> None:
        """Drop slots that are kept free, longest kept first, until all slots fit `limit_bytes`."""
        while self._kept and self._used_bytes() + self._kept_bytes() > limit_bytes:
            self._kept.pop(0)

    def _used_bytes(self) -> int:
        return sum(slot.size_bytes for slots in (self._resident, self._filling) for slot in slots.values())

    def _kept_bytes(self) -> int:
        return sum(slot.size_bytes for slot in self._kept)

    def _fill(self, slot: Slot, spec: ExpertSpec) -> None:
        """Read the file's region into the slot; a file not seen before, or changed since, is checked by its sha256."""
        try:
            descriptor = os.open(spec.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ExpertError(spec.expert, describe_os_error(error), spec.file) from error
        try:
            state = os.fstat(descriptor)
            identity = (state.st_ino, state.st_size, state.st_mtime_ns, spec.sha256, slot.layout.layout)
            if self._verified.get(spec.file) == identity:
                self._transfer.fill(slot.buffer, descriptor, state.st_size - slot.size_bytes)
                return
            header = read_header_from(descriptor, spec.file)
            _check_header(header, slot.layout, spec)
            digest = hashlib.sha256(os.pread(descriptor, header.data_start, 0))
            self._transfer.fill(slot.buffer, descriptor, header.data_start, digest)
            check_digest(digest.hexdigest(), spec)
            self._verified[spec.file] = identity
        except WeightsError as error:
            raise ExpertError(spec.expert, error.message, spec.file) from error
        except EOFError as error:
            raise ExpertError(spec.expert, f"{error}; import the expert again", spec.file) from error
        except OSError as error:
            raise ExpertError(spec.expert, describe_os_error(error), spec.file) from error
        finally:
            os.close(descriptor)


def _check_header(header: Header, layout: Layout, spec: ExpertSpec) -> None:
    found = header.metadata.get("layout")
    if found != layout.layout:
        raise WeightsError(spec.file, f"has the layout {found}, the catalog said {layout.layout}; reload the catalog")
    if header.entries != layout.entries or header.region_bytes != layout.region_bytes:
        message = "holds its tensors in another order than this version needs; import the expert again"
        raise WeightsError(spec.file, message)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
