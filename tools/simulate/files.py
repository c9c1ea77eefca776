"""Devices and tasks as files (docs/architecture.md): read, checked, and refused with a sentence."""

import gzip
import zlib
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

M = TypeVar("M", bound=BaseModel)

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


class FileError(ValueError):
    """A device or task that cannot be simulated: the file, the place in it, and what is wrong."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ChannelSection(_Part):
    """One transfer at a time; `fixed_s` is spent beside the channel, for each load."""

    bytes_per_s: Positive
    fixed_s: NotNegative = 0.0


class ArchitectureCost(_Part):
    """A batch of n takes k_s · n + b_s; `activation_bytes` for each image of it."""

    k_s: Positive
    b_s: NotNegative
    activation_bytes: Annotated[int, Field(ge=0)] = 0


class Processor(_Part):
    """`concurrency`: m batches at once each run at min(1, concurrency / m)."""

    memory_bytes: Count
    executors: Annotated[int, Field(ge=0)]
    concurrency: Positive
    max_batch: Count
    expert_share: Share = 1.0
    architectures: dict[str, ArchitectureCost]


class ChannelsSection(_Part):
    disk: ChannelSection
    link: ChannelSection = ChannelSection(bytes_per_s=1e12)


class HostSection(_Part):
    """One PC. With unified memory nothing is cached: a GPU's loads cost disk and link."""

    unified_memory: bool = False
    channels: ChannelsSection
    processors: dict[Literal["gpu", "cpu"], Processor]


class NetworkSection(_Part):
    """The line's only uplink to the other PCs: `latency_ms` each way."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gbit_per_s: Positive
    latency_ms: NotNegative = 0.0
    image_bytes: Annotated[int, Field(ge=0)]

    @property
    def bytes_per_s(self) -> float:
        return self.gbit_per_s * 1e9 / 8


class OtherHostSection(_Part):
    """Another PC; what it leaves out is as in the line's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unified_memory: bool | None = None
    channels: ChannelsSection | None = None
    processors: dict[Literal["gpu", "cpu"], Processor] | None = None


class DeviceFile(HostSection):
    """The line's PC, and others: `pcs` equal ones in all, or `hosts` by name."""

    name: str
    pcs: Count = 1
    hosts: dict[Annotated[str, Field(pattern="^[a-z][a-z0-9]*$")], OtherHostSection] = {}
    network: NetworkSection | None = None

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        if self.pcs > 1 and self.hosts:
            raise ValueError(
                "pcs and hosts exclude each other: name the other PCs, or say how many equal ones there are"
            )
        if (self.pcs > 1 or self.hosts) and self.network is None:
            raise ValueError("several PCs need a network: add network: {gbit_per_s, latency_ms, image_bytes}")
        return self

    def by_host(self) -> dict[str, HostSection]:
        """Return every PC by name; the line's own, first, is ""."""
        others = self.hosts or {f"pc{number}": OtherHostSection() for number in range(2, self.pcs + 1)}
        return {"": self} | {
            name: HostSection.model_validate(self.model_dump() | host.model_dump(exclude_none=True))
            for name, host in others.items()
        }


class TaskExpert(_Part):
    """`usage` is the probability that an image uses it, `then` the expert behind it."""

    id: str
    architecture: str
    bytes: Count
    usage: NotNegative
    then: str | None = None


class TaskFile(_Part):
    """`requests`: (arrival in seconds, first expert, the expert that follows for this image or None)."""

    name: str
    experts: Annotated[list[TaskExpert], Field(min_length=1)]
    requests: Annotated[list[tuple[NotNegative, str, str | None]], Field(min_length=1)]


def read_device(path: Path) -> DeviceFile:
    """Raises FileError."""
    return _read(path, DeviceFile)


def read_task(path: Path) -> TaskFile:
    """Return a task, its requests in the order of arrival. Raises FileError."""
    task = _read(path, TaskFile)
    names = {expert.id for expert in task.experts}
    if len(names) != len(task.experts):
        raise FileError(f"{path}: experts: two have one id; every id must be its own")
    for expert in task.experts:
        if expert.then is not None and expert.then not in names:
            raise FileError(f"{path}: experts: {expert.id} is followed by {expert.then}, which is not among them")
    for number, (_, first, then) in enumerate(task.requests):
        for name in (first, then):
            if name is not None and name not in names:
                raise FileError(f"{path}: requests[{number}]: {name} is not among the experts")
    return task.model_copy(update={"requests": sorted(task.requests, key=lambda request: request[0])})


def _read(path: Path, model: type[M]) -> M:
    try:
        data = path.read_bytes()
        return model.model_validate_json(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, zlib.error, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{path}: cannot be read ({reason}); name a file of JSON, or of JSON in gzip") from error
    except ValidationError as error:
        first = error.errors()[0]
        whole = "expected JSON, or JSON in gzip" if first["type"] == "json_invalid" else "as a whole"
        place = ".".join(map(str, first["loc"])) or whole
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise FileError(f"{path}: {place}: {first['msg']}{more}") from error
