"""The profile of a machine (CoServe §4.5): what the offline profiler measured here, one YAML file, read at start.

Its rows are the performance matrix; its recommendations fill gaps in `coserve.yaml`. Another machine refuses it.
"""

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import pynvml
from pydantic import BaseModel, ConfigDict, Field

from daemon.config.settings import DEVICE_NAME
from daemon.errors import ConfigError
from daemon.host.temperature import nvidia_gpus
from daemon.policy.matrix import Performance
from daemon.units import Bytes, Count, size_text
from experts.spec import ArchitectureId
from routing_rules.load import Problem, read_yaml, validate

#: Memory of the same machine as two kernels report it differs by what each reserves for itself.
_MEMORY_TOLERANCE = 0.05

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MachineIdentity(_Section):
    """The properties of a machine without which its figures are wrong on another. `gpus` are names, by number."""

    cpu: str
    cores: Count
    memory_bytes: Bytes
    gpus: tuple[str, ...] = ()

    def differences(self, here: "MachineIdentity") -> list[str]:
        texts: list[str] = []
        if self.cpu != here.cpu:
            texts.append(f"its processor is {self.cpu!r}, here it is {here.cpu!r}")
        if self.cores != here.cores:
            texts.append(f"it has {self.cores} cores, this one {here.cores}")
        if abs(self.memory_bytes - here.memory_bytes) > _MEMORY_TOLERANCE * self.memory_bytes:
            texts.append(f"it has {size_text(self.memory_bytes)} of memory, this one {size_text(here.memory_bytes)}")
        if self.gpus != here.gpus:
            texts.append(f"its GPUs are {_listed(self.gpus)}, here they are {_listed(here.gpus)}")
        return texts


class ArchitectureEntry(_Section):
    """One layout on one device: seconds of a batch of n, `k_s` · n + `b_s`, and of a load from each tier.

    `residual` is the largest relative error of that line over the measured batches.
    """

    k_s: NotNegative
    b_s: NotNegative
    residual: NotNegative = 0.0
    max_batch: Count
    activation_bytes: Annotated[int, Field(ge=0)] = 0
    disk_s: Positive
    ram_s: Positive | None = None


class DeviceEntry(_Section):
    """One processor: its best settings (memory: bytes of the whole device), its rows by layout."""

    executors: Count | None = None
    threads: Count | None = None
    expert_memory: Bytes | None = None
    activation_memory: Bytes | None = None
    architectures: dict[str, ArchitectureEntry] = {}


class ProfileFile(_Section):
    """The whole file. `profile` is the version of its format; `usage` by expert is empty where the rules give it."""

    profile: Literal[1]
    made: datetime
    machine: MachineIdentity
    devices: Annotated[dict[Annotated[str, Field(pattern=DEVICE_NAME)], DeviceEntry], Field(min_length=1)]
    usage: dict[str, Annotated[float, Field(ge=0, le=1)]] = {}


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile that was read; its `rows` are the performance matrix."""

    path: Path
    file: ProfileFile
    rows: tuple[Performance, ...]
    machine_line: int

    def rows_of(self, device: str) -> tuple[Performance, ...]:
        return tuple(row for row in self.rows if row.device == device)

    def machine_problems(self, here: MachineIdentity) -> list[Problem]:
        other = self.file.machine.differences(here)
        if not other:
            return []
        message = f"this profile is of another machine: {'; '.join(other)}; measure this one: coserve profile CONFIG"
        return [Problem(str(self.path), self.machine_line, 1, message)]


def load_profile(path: Path) -> Profile:
    """Read a profile of any machine; ConfigError names every mistake with its line."""
    document = read_yaml(path)
    file, problems = validate(ProfileFile, document)
    if file is None:
        raise ConfigError(problems)
    rows = [
        Performance(device, ArchitectureId(layout), **row.model_dump(exclude={"residual"}))
        for device, entry in file.devices.items()
        for layout, row in entry.architectures.items()
    ]
    return Profile(path, file, tuple(rows), document.where(("machine",), key=True)[0])


def this_machine() -> MachineIdentity:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MachineIdentity(cpu=_cpu_model(), cores=os.cpu_count() or 1, memory_bytes=memory_bytes, gpus=_gpu_names())


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_names() -> tuple[str, ...]:
    with suppress(pynvml.NVMLError), nvidia_gpus() as numbers:
        return tuple(str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(number))) for number in numbers)
    return ()


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) if names else "none"
