"""Filling slots and computing from them: one small interface for the CPU, host memory alone, and CUDA devices.

`fill` and `copy` are blocking calls of a loader thread. No event passes between filling and computing, because:

- When they return, the bytes are on the device, and only then does the pool show the slot to executors. Any work of
  an executor, on any stream, starts after the last byte arrived.
- The scheduler evicts no expert while a batch of it runs, and a slot is refilled only after eviction. An executor
  reports a batch's end after copying the output to the host, so its stream has finished. A batch that fails half way
  leaves kernels behind: `computing` waits for them before the error passes on.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from experts.memory import HostMemory
from experts.reading import Read
from experts.stored import StoredForm
from experts.weights import PAGE_BYTES

#: Two of these per loader thread and pool are in flight between file and GPU; large enough that neither side waits
#: for calls.
_STAGING_BYTES = 16 << 20
#: A thin file is expanded behind its reading, which advances by half of what is left, one to four times this much: few
#: reads keep a disk busy, and little is left to expand after the last one.
_READ_BYTES = 2 << 20

#: A call, and how many bytes of the region must have arrived before it.
_Expansion = tuple[int, Callable[[], object]]


@dataclass(eq=False, slots=True)
class SlotMemory:
    """One slot's memory, with every view that a fill needs, so that filling makes none.

    `buffer` is (size_bytes,) uint8 on the device. In host memory `memory` is the same bytes; elsewhere
    `pieces` are the parts of `buffer` that each pass through a staging page.
    """

    buffer: torch.Tensor
    memory: HostMemory | None = None
    pieces: tuple[torch.Tensor, ...] = ()

    @property
    def host(self) -> HostMemory:
        """Return its host memory. Raises TypeError if it has none: another device's transfer made it."""
        if self.memory is None:
            raise TypeError("this place is not in host memory; it belongs to another device's transfer")
        return self.memory


class HostTransfer:
    """Slots in memory, read from the file (or its cache) into place; pinned if GPUs are to copy from them.

    Makes and fills the slots of one device, and orders computing after the copies. Thread-safe.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self.device = torch.device("cpu")
        self._pin = pin
        self._warned = False
        self._log: Any = structlog.get_logger("transfer")

    def allocate(self, size_bytes: int) -> SlotMemory:
        """Allocate one slot. Raises MemoryError, RuntimeError or OSError if no memory is left."""
        memory = HostMemory(size_bytes, pin=self._pin)
        self._warn_unpinned(memory)
        return SlotMemory(memory.tensor, memory)

    def vacate(self, place: SlotMemory) -> None:
        """Give a place's memory back. Tensors that view it stay, and are valid again after `occupy`."""
        place.host.vacate()

    def occupy(self, place: SlotMemory) -> None:
        """Take memory again for a vacated place, on a GPU at another address. Raises as `allocate`."""
        memory = place.host
        memory.occupy()
        self._warn_unpinned(memory)

    def fill(self, place: SlotMemory, read: Read, form: StoredForm) -> None:
        """Fill all of the place from a file's region in the stored form `form`. Raises what `read` does."""
        memory = place.host
        if form.is_thin:
            _read_and_expand(memory.tensor, memory.view[-form.region_bytes :], form, read)
        else:
            read(memory.view, 0)

    def copy(self, place: SlotMemory, source: HostMemory) -> None:
        """Copy as many bytes of host memory into all of the place."""
        np.copyto(place.host.array, source.array)

    def copy_out(self, place: SlotMemory, target: HostMemory) -> None:
        """Copy all of the place into as many bytes of host memory; no fill of it may be under way."""
        np.copyto(target.array, place.host.array)

    def computing(self) -> AbstractContextManager[Any]:
        """Enter the stream that this thread computes on."""
        return nullcontext()

    def upload(self, batch: NDArray[np.uint8]) -> torch.Tensor:
        """Return a batch of pixels on the device, within `computing`."""
        return torch.from_numpy(batch)

    def _warn_unpinned(self, memory: HostMemory) -> None:
        """Warn once: loads from unpinned memory work, but are slower, and nothing else would show why."""
        if memory.pin_error and not self._warned:
            self._warned = True
            self._log.warning(
                "memory_not_pinned",
                bytes=len(memory.view),
                cuda_error=memory.pin_error,
                instead="copies by staging pages",
            )


class StagedTransfer:
    """Slots that the host cannot write: filled from files through two staging pages, from pinned host memory directly.

    Each loader thread copies on a lane of its own, made by `lane(device, pages)`.
    """

    def __init__(self, device: str, lane: "Callable[[torch.device, int], CudaLane]", *, pin: bool = False) -> None:
        self.device = torch.device(device)
        self._lane = lane
        self._pin = pin
        self._own = threading.local()

    def allocate(self, size_bytes: int) -> SlotMemory:
        buffer = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        return SlotMemory(buffer, pieces=buffer.split(_STAGING_BYTES))

    def vacate(self, place: SlotMemory) -> None:
        place.buffer.untyped_storage().resize_(0)

    def occupy(self, place: SlotMemory) -> None:
        place.buffer.untyped_storage().resize_(place.buffer.numel())

    def fill(self, place: SlotMemory, read: Read, form: StoredForm) -> None:
        if form.is_thin:
            thin = place.buffer[-form.region_bytes :].split(_STAGING_BYTES)
            self._staging().fill(thin, read, form.expansion(place.buffer))
        else:
            self._staging().fill(place.pieces, read)

    def copy(self, place: SlotMemory, source: HostMemory) -> None:
        if source.pinned:
            self._staging().copy(place.buffer, source.tensor)
            return

        def read(view: memoryview, position: int) -> None:
            np.copyto(np.frombuffer(view, np.uint8), source.array[position : position + len(view)])

        self._staging().fill(place.pieces, read)

    def copy_out(self, place: SlotMemory, target: HostMemory) -> None:
        self._staging().copy(target.tensor, place.buffer)

    def computing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def upload(self, batch: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(batch).to(self.device)

    def _staging(self) -> "Staging":
        if not hasattr(self._own, "staging"):
            pages = [HostMemory(_STAGING_BYTES, pin=self._pin) for _ in range(2)]
            self._own.staging = Staging(self._lane(self.device, len(pages)), pages)
        return self._own.staging


class CudaTransfer(StagedTransfer):
    """Slots on a GPU: each loader thread copies, and each executor thread computes, on its own stream."""

    def __init__(self, device: str) -> None:
        super().__init__(device, CudaLane, pin=True)

    def computing(self) -> AbstractContextManager[Any]:
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        return _settled(self._own.stream)

    def upload(self, batch: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(batch).pin_memory().to(self.device, non_blocking=True)


class MappedTransfer(HostTransfer):
    """Slots in memory that host and GPU share: host writes end before `fill` returns, so later kernels see them."""

    def __init__(self, device: str) -> None:
        super().__init__(pin=True)
        self.device = torch.device(device)
        self._gpu = CudaTransfer(device)

    def allocate(self, size_bytes: int) -> SlotMemory:
        with torch.cuda.device(self.device):  # CUDA notes for which device memory was registered
            memory = _mapped(super().allocate(size_bytes))
            return SlotMemory(torch.as_tensor(_CudaView(memory.array), device=self.device), memory)

    def occupy(self, place: SlotMemory) -> None:
        with torch.cuda.device(self.device):
            super().occupy(place)
            _mapped(place)

    def computing(self) -> AbstractContextManager[Any]:
        return self._gpu.computing()

    def upload(self, batch: NDArray[np.uint8]) -> torch.Tensor:
        return self._gpu.upload(batch)


class _CudaView:
    """Describes an array of mapped host memory so that torch takes it for GPU memory, without a copy."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array
        address = (array.ctypes.data, False)
        self.__cuda_array_interface__ = {"shape": array.shape, "typestr": "|u1", "data": address, "version": 3}


class CudaLane:
    """A copy stream of its own, in order, with one event per page, so that copies and computing overlap."""

    def __init__(self, device: torch.device, pages: int) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copied = [torch.cuda.Event() for _ in range(pages)]

    def begin(self) -> None:
        """Order the following copies after all earlier work of the device."""
        # The allocator hands memory out in the order of the stream that was current when the slot was made.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy. Neither side may be touched before it is done."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def run(self, work: Callable[[], object]) -> None:
        """Start work of the device after the copies started so far."""
        with torch.cuda.stream(self._stream):
            work()

    def mark(self, page: int) -> None:
        """Remember for `page` all copies started so far."""
        self._copied[page].record(self._stream)

    def wait(self, page: int) -> None:
        """Block until the copies remembered for `page` are done."""
        self._copied[page].synchronize()

    def finish(self) -> None:
        self._stream.synchronize()


class Staging:
    """One thread's way into slots that the host cannot write: copies one page while it reads the next."""

    def __init__(self, lane: CudaLane, pages: Sequence[HostMemory]) -> None:
        self._lane = lane
        self._pages = pages
        self._parts: dict[tuple[int, int], tuple[torch.Tensor, memoryview]] = {}

    def fill(self, pieces: Sequence[torch.Tensor], read: Read, expansion: Iterable[_Expansion] = ()) -> None:
        """Fill the pieces, and make each call of the expansion once its bytes have been copied."""
        waiting = deque(expansion)
        self._lane.begin()
        position = 0
        try:
            for number, piece in enumerate(pieces):
                page = number % len(self._pages)
                part, view = self._part(page, piece.numel())
                self._lane.wait(page)
                read(view, position)
                self._lane.copy(piece, part)
                self._lane.mark(page)
                position += len(view)
                while waiting and waiting[0][0] <= position:
                    self._lane.run(waiting.popleft()[1])
        finally:
            self._lane.finish()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy without a page: from pinned host memory to the device, or from the device to host memory."""
        self._lane.begin()
        try:
            self._lane.copy(target, source)
        finally:
            self._lane.finish()

    def _part(self, page: int, size_bytes: int) -> tuple[torch.Tensor, memoryview]:
        """Return the start of a page, cached by length: a layout has one length that is not a whole page."""
        part = self._parts.get((page, size_bytes))
        if part is None:
            tensor = self._pages[page].tensor[:size_bytes]
            part = self._parts[page, size_bytes] = (tensor, tensor.numpy().data)
        return part


#: Transfers of either kind; HostTransfer documents the methods.
DeviceTransfer = HostTransfer | StagedTransfer


def transfer_for(device: str, *, shared: bool = False) -> DeviceTransfer:
    """Return the transfer of "cpu", "ram" (host memory that nothing computes from) or "cuda:N".

    `shared`: the GPU's memory is the host's.
    """
    if device == "cpu":
        return HostTransfer()
    if device == "ram":
        return HostTransfer(pin=torch.cuda.is_available())
    if device.startswith("cuda"):
        return MappedTransfer(device) if shared else CudaTransfer(device)
    raise ValueError(f"unknown device {device!r}; expected cpu, ram or cuda:N")


@contextmanager
def _settled(stream: torch.cuda.Stream) -> Iterator[None]:
    """Compute on a stream; on failure, wait for the kernels that were started."""
    with torch.cuda.stream(stream):
        try:
            yield
        except BaseException:
            stream.synchronize()
            raise


def _read_and_expand(buffer: torch.Tensor, end: memoryview, form: StoredForm, read: Read) -> None:
    """Read a thin region into the end of a slot on another thread, and expand behind it."""
    arrivals: SimpleQueue[int | BaseException] = SimpleQueue()

    def read_all() -> None:
        try:
            begin = 0
            while begin < len(end):
                half_bytes = (len(end) - begin) // (2 * PAGE_BYTES) * PAGE_BYTES
                part = end[begin : begin + min(4 * _READ_BYTES, max(_READ_BYTES, half_bytes))]
                read(part, begin)
                begin += len(part)
                arrivals.put(begin)
        except BaseException as error:  # noqa: BLE001  # raised by the thread that waits for the bytes
            arrivals.put(error)

    thread = threading.Thread(target=read_all, name="thin-read", daemon=True)
    thread.start()
    try:
        arrived = 0
        for needed, work in form.expansion(buffer):
            while arrived < needed:
                arrival = arrivals.get()
                if isinstance(arrival, BaseException):
                    raise arrival
                arrived = arrival
            work()
    finally:
        thread.join()


def _mapped(place: SlotMemory) -> HostMemory:
    memory = place.host
    if not memory.pinned:
        raise RuntimeError(f"CUDA does not map host memory here (error {memory.pin_error})")
    return memory
