"""Check the GPUs through NVML alone: their memory is not touched."""

from dataclasses import dataclass

import psutil
import pynvml

from daemon.host.temperature import nvidia_gpus


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver, the newest CUDA it serves as (major, minor), and the GPUs in its order."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


def find_driver() -> Driver | None:
    """Return this machine's driver; None if there is none or it does not answer."""
    try:
        with nvidia_gpus() as numbers:
            cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
            version = str(pynvml.nvmlSystemGetDriverVersion())
            return Driver(version, (cuda // 1000, cuda % 1000 // 10), tuple(map(_gpu, numbers)))
    except pynvml.NVMLError:
        return None


def _gpu(number: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total_bytes, free_bytes = int(memory.total), int(memory.free)
    except pynvml.NVMLError as error:
        if getattr(error, "value", None) != pynvml.NVML_ERROR_NOT_SUPPORTED:  # else it computes in the host's memory
            raise
        total_bytes, free_bytes = psutil.virtual_memory()[:2]
    return Gpu(str(pynvml.nvmlDeviceGetName(handle)), total_bytes, free_bytes)
