"""The simulated world: a machine as pools, executors, channels and costs, and a task as requests with their chains."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from daemon.policy.matrix import Performance
from daemon.policy.paper.assign import partition
from daemon.policy.presets import preset
from daemon.policy.request import RAM, ExecutorFacts, ExecutorId, ExpertFacts, PoolFacts, PoolId
from experts.spec import ArchitectureId, ExpertId
from tools.simulate.files import DeviceFile, FileError, Processor, TaskFile

#: Seconds beside the channel where slots are loaded: nothing is deserialised (docs/simulating.md).
SLOT_DISK_FIXED_S, SLOT_LINK_FIXED_S = 0.03, 0.005
#: Share of the GPU's memory that the baselines give to experts.
_BASELINE_SHARE = 0.9

#: How every policy loads experts: into slots as the daemon does, or as the paper does, deserialising each.
Loading = Literal["slots", "ordinary"]


@dataclass(frozen=True, slots=True)
class TransferChannel:
    """One transfer at a time; `fixed_s` passes beside it for each load."""

    name: str
    bytes_per_s: float
    fixed_s: float


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """Everything a simulated run needs to know of a PC under one policy.

    `concurrency` is by device: m batches at once each run at min(1, concurrency / m). `from_disk` and
    `from_ram` list the channels that a load into a device's pools passes.
    """

    pools: tuple[PoolFacts, ...]
    executors: tuple[ExecutorFacts, ...]
    matrix: tuple[Performance, ...]
    concurrency: Mapping[str, float]
    from_disk: Mapping[str, tuple[TransferChannel, ...]]
    from_ram: Mapping[str, tuple[TransferChannel, ...]]
    memory_bytes: int
    #: Measured seconds of a load from disk and from host memory by device and architecture, instead of bytes / rate.
    load_s: Mapping[tuple[str, ArchitectureId], tuple[float, float]] | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """One image: its chain of experts, which only the simulated networks know."""

    arrived_s: float
    chain: tuple[ExpertId, ...]
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    experts: tuple[ExpertFacts, ...]
    images: tuple[Image, ...]


def task_of(file: TaskFile) -> Task:
    """A task file as values. A chain's pass rate follows from the usages: of a detector and of those before it."""
    usage = {expert.id: expert.usage for expert in file.experts}
    before: dict[str, float] = {}
    for expert in file.experts:
        if expert.then is not None:
            before[expert.then] = before.get(expert.then, 0.0) + expert.usage
    experts = tuple(
        ExpertFacts(
            expert=ExpertId(expert.id),
            architecture=ArchitectureId(expert.architecture),
            weights_bytes=expert.bytes,
            usage=expert.usage,
            then=() if expert.then is None else ((ExpertId(expert.then), _pass_rate(expert.then, usage, before)),),
        )
        for expert in file.experts
    )
    images = tuple(
        Image(arrived_s, (ExpertId(first),) if then is None else (ExpertId(first), ExpertId(then)))
        for arrived_s, first, then in file.requests
    )
    return Task(file.name, experts, images)


def machine_of(file: DeviceFile, task: Task, policy: str, loading: Loading = "slots") -> SimulatedMachine:
    """A device file as it is set up for `policy` (docs/simulating.md).

    Policies are compared with one `loading`. Raises FileError if the device says nothing of an architecture that the
    task uses.
    """
    rules, slots = preset(policy), loading == "slots"
    _check_costs(file, task)
    disk = TransferChannel(
        "disk", file.channels.disk.bytes_per_s, SLOT_DISK_FIXED_S if slots else file.channels.disk.fixed_s
    )
    link = TransferChannel(
        "link", file.channels.link.bytes_per_s, SLOT_LINK_FIXED_S if slots else file.channels.link.fixed_s
    )
    gpu, cpu = file.processors.get("gpu"), file.processors.get("cpu")
    pools: list[PoolFacts] = []
    executors: list[ExecutorFacts] = []
    if gpu is not None:
        share = gpu.expert_share if rules.initial_fill else _BASELINE_SHARE
        pools.append(_pool("cuda:0", gpu, round(gpu.memory_bytes * share), gpu.memory_bytes))
        executors += _executors("cuda:0", gpu)
    cached_bytes = 0 if cpu is None else cpu.memory_bytes
    if cpu is not None and cpu.executors and not (rules.single_executor and gpu is not None):
        activation_bytes = max((cost.activation_bytes for cost in cpu.architectures.values()), default=0)
        needed_bytes = cpu.executors * cpu.max_batch * activation_bytes
        for_experts = round(cpu.memory_bytes * cpu.expert_share) - needed_bytes
        pools.append(_pool("cpu", cpu, for_experts, for_experts + needed_bytes))
        executors += _executors("cpu", cpu)
        cached_bytes -= for_experts + needed_bytes
    if gpu is not None and not file.unified_memory and cached_bytes > 0:
        pools.append(PoolFacts(RAM, "ram", cached_bytes, 1))
    matrix = [
        row for name, processor in file.processors.items() for row in _rows(name, processor, task, disk, link, file)
    ]
    new_pools, new_executors = partition(pools, executors, rules)
    through = (disk, link)
    return SimulatedMachine(
        pools=new_pools,
        executors=new_executors,
        matrix=tuple(matrix),
        concurrency={_device(name): processor.concurrency for name, processor in file.processors.items()},
        from_disk={"cuda:0": through, "cpu": (disk,), RAM: (disk,)},
        # Both directions of the link work at once; what comes back is written over nothing that must be set up.
        from_ram={"cuda:0": (link,), RAM: (TransferChannel("link back", link.bytes_per_s, 0.0),)},
        memory_bytes=sum(processor.memory_bytes for processor in file.processors.values()),
    )


def with_deadlines(task: Task, seconds: float) -> Task:
    """Return the task with a deadline for each image, `seconds` after its arrival."""
    return replace(task, images=tuple(replace(image, deadline_s=image.arrived_s + seconds) for image in task.images))


def _check_costs(file: DeviceFile, task: Task) -> None:
    for name, processor in file.processors.items():
        for facts in task.experts:
            if facts.architecture not in processor.architectures:
                raise FileError(
                    f"device {file.name}: processors.{name}.architectures: what {facts.architecture} costs is missing, "
                    f"and {facts.expert} of task {task.name} is one: add its k_s, b_s and activation_bytes"
                )


def _pool(name: str, processor: Processor, expert_bytes: int, all_bytes: int) -> PoolFacts:
    free_bytes = all_bytes - expert_bytes
    each_bytes = free_bytes // max(1, processor.executors)
    kind = "cpu" if name == "cpu" else "gpu"
    return PoolFacts(PoolId(name), kind, expert_bytes, processor.max_batch, each_bytes)


def _executors(name: str, processor: Processor) -> list[ExecutorFacts]:
    return [
        ExecutorFacts(ExecutorId(f"{name}/{number}"), PoolId(name)) for number in range(max(1, processor.executors))
    ]


def _rows(
    name: str, processor: Processor, task: Task, disk: TransferChannel, link: TransferChannel, file: DeviceFile
) -> Iterable[Performance]:
    for architecture, cost in processor.architectures.items():
        sizes = [facts.weights_bytes for facts in task.experts if facts.architecture == architecture]
        if not sizes:
            continue
        size_bytes = max(sizes)
        disk_s = size_bytes / disk.bytes_per_s + disk.fixed_s
        link_s = size_bytes / link.bytes_per_s + link.fixed_s
        yield Performance(
            device=_device(name),
            architecture=ArchitectureId(architecture),
            k_s=cost.k_s,
            b_s=cost.b_s,
            max_batch=processor.max_batch,
            activation_bytes=cost.activation_bytes,
            disk_s=disk_s + link_s if name == "gpu" else disk_s,
            ram_s=link_s if name == "gpu" and not file.unified_memory else None,
        )


def _device(name: str) -> str:
    return "cuda:0" if name == "gpu" else name


def _pass_rate(then: str, usage: Mapping[str, float], before: Mapping[str, float]) -> float:
    return min(1.0, usage[then] / before[then]) if before[then] > 0.0 else 0.0
