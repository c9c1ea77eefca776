"""Filling a slot and computing from it: one small interface, for the CPU and for CUDA devices.

A fill is a blocking call of a loader thread; when it returns, the bytes are on the device and any stream may read
them. Bytes pass the host once, and on the way a digest may see them.
"""

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

#: Linux moves at most 2 GiB per read call.
_READ_BYTES = 1 << 30
#: Two of these per loader thread are in flight between file and GPU; large enough for the raw rate of PCIe.
_STAGING_BYTES = 8 << 20


class Digest(Protocol):
    """What hashlib makes."""

    def update(self, data: memoryview, /) -> None: ...


class Transfer(Protocol):
    """How one device's slots are made, filled and computed from. Thread-safe."""

    @property
    def device(self) -> torch.device: ...

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """(size_bytes,) uint8 on the device."""
        ...

    def fill(self, buffer: torch.Tensor, descriptor: int, offset: int, digest: Digest | None = None) -> None:
        """Read the whole buffer from a file; `digest` is updated with the bytes. Raises EOFError, OSError."""
        ...

    def computing(self) -> AbstractContextManager[Any]:
        """The stream that this thread computes on."""
        ...

    def upload(self, batch: NDArray[np.uint8]) -> torch.Tensor:
        """A batch of pixels on the device, within `computing`."""
        ...


class CpuTransfer:
    """Slots in memory, read straight from the file (or its cache) into place."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def fill(self, buffer: torch.Tensor, descriptor: int, offset: int, digest: Digest | None = None) -> None:
        view = buffer.numpy().data
        read_exactly(descriptor, view, offset)
        if digest is not None:
            digest.update(view)

    def computing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def upload(self, batch: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(batch)


class CudaTransfer:
    """Slots on a GPU, filled through pinned pages on a copy stream of the loader thread's own."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._own = threading.local()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def fill(self, buffer: torch.Tensor, descriptor: int, offset: int, digest: Digest | None = None) -> None:
        if not hasattr(self._own, "channel"):
            self._own.channel = _Channel(self.device)
        self._own.channel.fill(buffer, descriptor, offset, digest)

    def computing(self) -> AbstractContextManager[Any]:
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._own.stream)

    def upload(self, batch: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(batch).pin_memory().to(self.device, non_blocking=True)


class _Channel:
    """One thread's way to a GPU: while one pinned page is copied to the device, the other is read from the file."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pages = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]

    def fill(self, buffer: torch.Tensor, descriptor: int, offset: int, digest: Digest | None) -> None:
        # The buffer may have been allocated, or last read, on another stream of this thread.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            for number, begin in enumerate(range(0, buffer.numel(), _STAGING_BYTES)):
                page, copied = self._pages[number % 2], self._copied[number % 2]
                target = buffer[begin : begin + _STAGING_BYTES]
                copied.synchronize()
                view = page.numpy().data[: target.numel()]
                read_exactly(descriptor, view, offset + begin)
                if digest is not None:
                    digest.update(view)
                with torch.cuda.stream(self._stream):
                    target.copy_(page[: target.numel()], non_blocking=True)
                    copied.record(self._stream)
        finally:
            self._stream.synchronize()


def read_exactly(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill `view` from the file at `offset`, however short the single reads are. Raises EOFError, OSError."""
    position = 0
    while position < len(view):
        count = os.preadv(descriptor, [view[position : position + _READ_BYTES]], offset + position)
        if count == 0:
            raise EOFError(f"the file ends {len(view) - position} bytes early")
        position += count


def transfer_for(device: str) -> Transfer:
    """The implementation for "cpu" or "cuda:N"."""
    if device == "cpu":
        return CpuTransfer()
    if device.startswith("cuda"):
        return CudaTransfer(device)
    raise ValueError(f"unknown device {device!r}; expected cpu or cuda:N")
