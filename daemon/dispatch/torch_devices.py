"""The real devices: experts in slots of a device's memory, networks computed by torch. Only this file imports torch."""

from collections.abc import Callable, Mapping, Sequence

import torch

from daemon.config.settings import Device
from daemon.dispatch.pool import DevicePool, Mark, Read, device_pools
from daemon.policy.request import ExecutorFacts, PoolFacts, PoolId, device_of
from experts.transfer import transfer_for
from experts.vision.graphs import Recorders
from experts.vision.infer import infer_each
from experts.vision.slot import LayoutShelf, SlotPool


class TorchDevices:
    """`Devices` (pool.py) of this PC as `coserve.yaml` describes them: CUDA devices by number, and the CPU."""

    def __init__(self, devices: Mapping[str, Device]) -> None:
        self._devices = devices
        self._shelf = shelf_of({name: device for name, device in devices.items() if device.host is None})

    def gpu_count(self) -> int:
        return torch.cuda.device_count()

    def pools(
        self,
        facts: Sequence[PoolFacts],
        executors: Sequence[ExecutorFacts],
        read: Read,
        new_mark: Callable[[], Mark],
        max_pixels: int,
    ) -> list[DevicePool]:
        slots = {each.pool: SlotPool(each.device, each.budget_bytes, self._shelf) for each in facts}
        return device_pools(facts, executors, slots, infer_each, read, new_mark, max_pixels, self._enter)

    def _enter(self, pool: PoolId) -> None:
        set_threads(self._devices[device_of(pool)].threads)


def shelf_of(devices: Mapping[str, Device]) -> LayoutShelf:
    """Return what pools share. Recordings get half of the activation memory: other batches need the rest."""
    recorded = {
        torch.device(name): device.activation_memory // (2 * device.executors)
        for name, device in devices.items()
        if device.activation_memory is not None
    }
    shared = {name for name, device in devices.items() if device.memory == "shared"}
    return LayoutShelf(
        recorders=Recorders(limits=recorded),
        transfers=lambda name: transfer_for(name, shared=name in shared),
        packs=[*devices] == ["cpu"],
    )


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    # Asking makes it this thread's own: until then the next thread's setting would overwrite it (measured).
    torch.get_num_threads()
