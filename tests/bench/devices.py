"""Simulated GPUs for benchmarks, `sim:0` and on: they compute on the CPU, and streams of their own fill their slots.

`lost:0` is one that disappears after some copies and batches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experts.transfer import DeviceTransfer, StagedTransfer, transfer_for
from experts.vision.slot import LayoutShelf
from tests.experts.lanes import StreamLane

#: Copies and batches before a device is lost.
_LAST_WORK = 40


class SimulatedGpu(StagedTransfer):
    """Slots in host memory that are filled over late streams; `on_work` comes before each copy and each batch."""

    def __init__(self, on_work: Callable[[], object]) -> None:
        lane: Any = partial(StreamLane, on_work=on_work)  # has the methods of CudaLane
        super().__init__("cpu", lane)
        self._on_work = on_work

    def upload(self, batch: NDArray[np.uint8]) -> torch.Tensor:
        self._on_work()
        return super().upload(batch)


def bench_shelf(*, packs: bool = False) -> LayoutShelf:
    """Return what the pools of a benchmark share, on this machine's devices and on simulated ones.

    `packs` as on a line (LayoutShelf): True where no pool copies from the CPU's.
    """
    work = iter(range(_LAST_WORK))

    def next_work() -> None:
        if next(work, None) is None:
            raise RuntimeError("CUDA error: the device is lost (simulated)")

    def transfer(name: str) -> DeviceTransfer:
        kind = name.partition(":")[0]
        if kind in ("sim", "lost"):
            return SimulatedGpu(next_work if kind == "lost" else lambda: None)
        return transfer_for(name)

    return LayoutShelf(transfers=transfer, packs=packs)
