"""The simulated world: a machine as pools, executors, channels and costs, and a task as requests with their chains."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from daemon.policy.matrix import Performance
from daemon.policy.paper.assign import partition
from daemon.policy.predict import family_facts
from daemon.policy.presets import Preset, preset
from daemon.policy.request import ExecutorFacts, ExecutorId, ExpertFacts, PoolFacts, PoolId
from experts.spec import ArchitectureId, ExpertId
from tools.simulate.files import ChannelSection, DeviceFile, FileError, HostSection, NetworkSection, Processor, TaskFile

#: Seconds beside the channel where slots are loaded: nothing is deserialised (docs/architecture.md).
SLOT_DISK_FIXED_S, SLOT_LINK_FIXED_S = 0.03, 0.005
#: A head with a handful of labels on a ResNet-18's features, as its file has it.
_HEAD_BYTES = 20_480
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
    """Everything a simulated run needs to know of a line's PCs under one policy.

    `concurrency` is by device: m batches at once each run at min(1, concurrency / m). `from_disk` and `from_ram` list
    the channels that a load into a device's pools passes.
    """

    pools: tuple[PoolFacts, ...]
    executors: tuple[ExecutorFacts, ...]
    matrix: tuple[Performance, ...]
    concurrency: Mapping[str, float]
    from_disk: Mapping[str, tuple[TransferChannel, ...]]
    from_ram: Mapping[str, tuple[TransferChannel, ...]]
    memory_bytes: int
    #: The network from the line's PC to the others; None if there are no others.
    network: NetworkSection | None = None
    #: Measured seconds of a load from disk and from host memory by device and architecture, instead of bytes / rate.
    load_s: Mapping[tuple[str, ArchitectureId], tuple[float, float]] | None = None


@dataclass(frozen=True, slots=True)
class TaskImage:
    """One image: its chain of experts, which only the simulated networks know."""

    arrived_s: float
    chain: tuple[ExpertId, ...]
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    experts: tuple[ExpertFacts, ...]
    images: tuple[TaskImage, ...]


def task_of(file: TaskFile) -> Task:
    """Return a task file as values. Pass rates follow from the usages of a detector and of those before it."""
    usage = {expert.id: expert.usage for expert in file.experts}
    before: dict[str, float] = {}
    for expert in file.experts:
        if expert.then is not None:
            before[expert.then] = before.get(expert.then, 0.0) + expert.usage

    def pass_rate(then: str) -> float:
        return min(1.0, usage[then] / before[then]) if before[then] > 0.0 else 0.0

    experts = tuple(
        ExpertFacts(
            expert=ExpertId(expert.id),
            architecture=ArchitectureId(expert.architecture),
            weights_bytes=expert.bytes,
            usage=expert.usage,
            then=() if expert.then is None else ((ExpertId(expert.then), pass_rate(expert.then)),),
        )
        for expert in file.experts
    )
    images = tuple(
        TaskImage(arrived_s, (ExpertId(first),) if then is None else (ExpertId(first), ExpertId(then)))
        for arrived_s, first, then in file.requests
    )
    return Task(file.name, experts, images)


def machine_of(file: DeviceFile, task: Task, policy: str, loading: Loading = "slots") -> SimulatedMachine:
    """Return a device file as it is set up for `policy`. Raises FileError if an architecture's costs are missing."""
    rules = preset(policy)
    pools: list[PoolFacts] = []
    executors: list[ExecutorFacts] = []
    matrix: list[Performance] = []
    concurrency: dict[str, float] = {}
    from_disk: dict[str, tuple[TransferChannel, ...]] = {}
    from_ram: dict[str, tuple[TransferChannel, ...]] = {}
    hosts = file.by_host()
    for host, pc in hosts.items():
        _check_costs(file, host, pc, task)
        before = f"{host} " if host else ""
        disk = _channel(f"{before}disk", pc.channels.disk, SLOT_DISK_FIXED_S if loading == "slots" else None)
        link = _channel(f"{before}link", pc.channels.link, SLOT_LINK_FIXED_S if loading == "slots" else None)
        new_pools, new_executors = _pools(host, pc, rules)
        pools += new_pools
        executors += new_executors
        matrix += [row for name in pc.processors for row in _rows(host, name, pc, task, disk, link)]
        gpu, cpu, ram = _device(host, "gpu"), _device(host, "cpu"), _device(host, "ram")
        concurrency |= {_device(host, name): processor.concurrency for name, processor in pc.processors.items()}
        from_disk |= {gpu: (disk, link), cpu: (disk,), ram: (disk,)}
        # Both directions of the link work at once; a copy back to host memory needs no set-up.
        from_ram |= {gpu: (link,), ram: (TransferChannel(f"{before}link back", link.bytes_per_s, 0.0),)}
    divided_pools, divided_executors = partition(pools, executors, rules)
    return SimulatedMachine(
        pools=divided_pools,
        executors=divided_executors,
        matrix=tuple(matrix),
        concurrency=concurrency,
        from_disk=from_disk,
        from_ram=from_ram,
        memory_bytes=sum(processor.memory_bytes for pc in hosts.values() for processor in pc.processors.values()),
        network=file.network if len(hosts) > 1 else None,
    )


def _pools(host: str, pc: HostSection, rules: Preset) -> tuple[list[PoolFacts], list[ExecutorFacts]]:
    gpu, cpu = pc.processors.get("gpu"), pc.processors.get("cpu")
    pools: list[PoolFacts] = []
    executors: list[ExecutorFacts] = []
    if gpu is not None:
        share = gpu.expert_share if rules.initial_fill else _BASELINE_SHARE
        pools.append(_pool(host, "gpu", gpu, round(gpu.memory_bytes * share), gpu.memory_bytes))
        executors += _executors(host, "gpu", gpu)
    cached_bytes = 0 if cpu is None else cpu.memory_bytes
    if cpu is not None and cpu.executors and not (rules.single_executor and gpu is not None):
        activation_bytes = max((cost.activation_bytes for cost in cpu.architectures.values()), default=0)
        needed_bytes = cpu.executors * cpu.max_batch * activation_bytes
        for_experts = round(cpu.memory_bytes * cpu.expert_share) - needed_bytes
        pools.append(_pool(host, "cpu", cpu, for_experts, for_experts + needed_bytes))
        executors += _executors(host, "cpu", cpu)
        cached_bytes -= for_experts + needed_bytes
    # The paper's policies have only one cache in host memory, that of the line's PC.
    has_cache = not host or rules.binding == "late"
    if gpu is not None and not pc.unified_memory and cached_bytes > 0 and has_cache:
        pools.append(PoolFacts(PoolId(_device(host, "ram")), "ram", cached_bytes, 1, host=host))
    return pools, executors


def with_heads(task: Task, pattern: str) -> Task:
    """Turn the matching experts into heads of one backbone per architecture. ValueError for none, or a chain."""
    matching = [facts for facts in task.experts if fnmatchcase(facts.expert, pattern)]
    if not matching:
        raise ValueError(f"no expert of {task.name} matches {pattern}")
    family_of = {facts.expert: ExpertId(f"family of {facts.architecture}") for facts in matching}
    families: dict[ExpertId, list[ExpertFacts]] = {}
    for facts in matching:
        families.setdefault(family_of[facts.expert], []).append(facts)
    experts = [facts for facts in task.experts if facts.expert not in family_of]
    for facts in matching:
        if follower := next((name for name, _ in facts.then if name in family_of), None):
            raise ValueError(f"{facts.expert} goes on to {follower}: both match {pattern}")
    for family, members in families.items():
        size = max(facts.weights_bytes for facts in members) + len(members) * _HEAD_BYTES
        experts.append(family_facts(family, members, size, family_of))
    images = tuple(
        replace(image, chain=tuple(family_of.get(expert, expert) for expert in image.chain)) for image in task.images
    )
    return Task(f"{task.name}, {len(matching)} experts as heads", tuple(experts), images)


def with_deadlines(task: Task, seconds: float) -> Task:
    return replace(task, images=tuple(replace(image, deadline_s=image.arrived_s + seconds) for image in task.images))


def _check_costs(file: DeviceFile, host: str, pc: HostSection, task: Task) -> None:
    place = f"hosts.{host}.processors" if host in file.hosts else "processors"
    for name, processor in pc.processors.items():
        for facts in task.experts:
            if facts.architecture not in processor.architectures:
                raise FileError(
                    f"device {file.name}: {place}.{name}.architectures: the costs of {facts.architecture} are missing, "
                    f"and {facts.expert} of task {task.name} is one: add its k_s, b_s and activation_bytes"
                )


def _channel(name: str, section: ChannelSection, fixed_s: float | None) -> TransferChannel:
    return TransferChannel(name, section.bytes_per_s, section.fixed_s if fixed_s is None else fixed_s)


def _pool(host: str, name: str, processor: Processor, expert_bytes: int, all_bytes: int) -> PoolFacts:
    free_bytes = all_bytes - expert_bytes
    each_bytes = free_bytes // max(1, processor.executors)
    kind = "cpu" if name == "cpu" else "gpu"
    return PoolFacts(PoolId(_device(host, name)), kind, expert_bytes, processor.max_batch, each_bytes, host)


def _executors(host: str, name: str, processor: Processor) -> list[ExecutorFacts]:
    device = _device(host, name)
    return [
        ExecutorFacts(ExecutorId(f"{device}/{number}"), PoolId(device)) for number in range(max(1, processor.executors))
    ]


def _rows(
    host: str, name: str, pc: HostSection, task: Task, disk: TransferChannel, link: TransferChannel
) -> Iterable[Performance]:
    processor = pc.processors["gpu" if name == "gpu" else "cpu"]
    for architecture, cost in processor.architectures.items():
        sizes = [facts.weights_bytes for facts in task.experts if facts.architecture == architecture]
        if not sizes:
            continue
        size_bytes = max(sizes)
        disk_s = size_bytes / disk.bytes_per_s + disk.fixed_s
        link_s = size_bytes / link.bytes_per_s + link.fixed_s
        yield Performance(
            device=_device(host, name),
            architecture=ArchitectureId(architecture),
            k_s=cost.k_s,
            b_s=cost.b_s,
            max_batch=processor.max_batch,
            activation_bytes=cost.activation_bytes,
            disk_s=disk_s + link_s if name == "gpu" else disk_s,
            ram_s=link_s if name == "gpu" and not pc.unified_memory else None,
        )


def _device(host: str, name: str) -> str:
    """Return a device's name: as a line has it, or of another host `pc2-gpu`."""
    return f"{host}-{name}" if host else "cuda:0" if name == "gpu" else name
