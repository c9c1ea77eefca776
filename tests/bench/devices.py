"""Simulated GPUs for benchmarks, `sim:0` and on: they compute on the CPU, and streams of their own fill their slots.

`lost:0` is one that disappears after some copies.
"""

from functools import partial

from experts.transfer import DeviceTransfer, StagedTransfer, transfer_for
from experts.vision.slot import LayoutShelf
from tests.experts.lanes import StreamLane

#: Copies that a device carries out before it is lost.
_LAST_COPIES = 40


def bench_shelf() -> LayoutShelf:
    """Return what the pools of a benchmark share, on this machine's devices and on simulated ones."""
    copies = iter(range(_LAST_COPIES))

    def next_copy() -> None:
        if next(copies, None) is None:
            raise RuntimeError("CUDA error: the device is lost (simulated)")

    def transfer(name: str) -> DeviceTransfer:
        kind = name.partition(":")[0]
        if kind not in ("sim", "lost"):
            return transfer_for(name)
        return StagedTransfer("cpu", partial(StreamLane, on_work=next_copy) if kind == "lost" else StreamLane, None)

    return LayoutShelf(transfers=transfer)
