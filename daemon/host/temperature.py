"""Temperatures from the kernel's sensors and NVIDIA's GPUs. Machines without sensors report no readings."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import pynvml

#: Reading all sensors takes milliseconds, and temperatures change slowly.
_KEEPS_S = 5.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The hottest of one chip's sensors; `limit_celsius` is the chip's own limit."""

    sensor: str
    celsius: float
    limit_celsius: float | None = None


class Thermometer:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readings: tuple[Reading, ...] = ()
        self._look_at_s = float("-inf")

    def read(self) -> tuple[Reading, ...]:
        with self._lock:
            if time.monotonic() >= self._look_at_s:
                self._readings = (*_chips(), *_gpus())
                self._look_at_s = time.monotonic() + _KEEPS_S
            return self._readings


@contextmanager
def nvidia_gpus() -> Iterator[range]:
    """Yield the numbers of this PC's GPUs while NVML answers about them; NVMLError without a driver."""
    pynvml.nvmlInit()
    try:
        yield range(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def _chips() -> Iterator[Reading]:
    try:
        chips = psutil.sensors_temperatures()
    except (OSError, ValueError, RuntimeError):
        return
    for chip, sensors in chips.items():
        readable = [sensor for sensor in sensors if sensor.current is not None]
        if readable:
            hottest = max(readable, key=lambda sensor: sensor.current)
            yield Reading(chip, float(hottest.current), hottest.critical or hottest.high or None)


def _gpus() -> Iterator[Reading]:
    with suppress(pynvml.NVMLError), nvidia_gpus() as numbers:
        for number in numbers:
            with suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
                limit = pynvml.nvmlDeviceGetTemperatureThreshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
                yield Reading(f"cuda:{number}", float(celsius), float(limit))
