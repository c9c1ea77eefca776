"""The real devices: experts in slots of a device's memory, networks computed by torch. Only this file imports torch."""

from collections.abc import Callable

import torch

from daemon.dispatch.executors import ExecutorThread
from daemon.policy.request import ExecutorFacts, PoolFacts
from daemon.records import JournalKey
from experts.vision.infer import infer
from experts.vision.slot import LayoutShelf, Slot, SlotPool


class TorchDevices:
    """`Devices` (orders.py) of this PC: CUDA devices by number, and the CPU."""

    def __init__(self) -> None:
        self._shelf = LayoutShelf()

    def gpu_count(self) -> int:
        return torch.cuda.device_count()

    def pool(self, facts: PoolFacts) -> SlotPool:
        pool = SlotPool(facts.device, facts.budget_bytes, self._shelf)
        if not self.gpu_count():  # a GPU may copy experts from the CPU's pool, as files hold them
            pool.pack_weights()
        return pool

    def executor(
        self,
        facts: ExecutorFacts,
        pool: SlotPool,
        read: Callable[[JournalKey], bytes],
        threads: int,
        mark: Callable[[JournalKey | None], None],
        max_pixels: int,
    ) -> ExecutorThread[Slot]:
        return ExecutorThread(
            facts, pool.slot, read, infer, enter=lambda: _set_threads(threads), mark=mark, max_pixels=max_pixels
        )


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    # Asking makes it this thread's own: until then the next thread's setting would overwrite it (measured).
    torch.get_num_threads()
