"""A line's processors as the scheduler sees them: what coserve.yaml says, completed by the profile of the machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from daemon.config.settings import Config, Device
from daemon.errors import ConfigError
from daemon.line.profile import MachineIdentity, Profile, load_profile
from daemon.policy.matrix import Performance
from daemon.policy.paper.assign import partition
from daemon.policy.predict import resident_bytes
from daemon.policy.presets import preset
from daemon.policy.request import RAM, ExecutorFacts, ExecutorId, PoolFacts, PoolId
from daemon.units import size_text
from experts.spec import ExpertId, ExpertSpec
from routing_rules.load import Problem

#: Settings that a profile recommends if coserve.yaml omits them.
_RECOMMENDED = ("executors", "threads", "expert_memory", "activation_memory")


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of profiles: the performance matrix, and usage if it was counted."""

    matrix: tuple[Performance, ...] = ()
    usage: Mapping[str, float] = field(default_factory=dict[str, float])


def complete(path: Path, config: Config, here: MachineIdentity) -> tuple[Config, Measurements, list[Problem | str]]:
    """Return the settings of `path` completed by their profiles (values set by hand win), and every mistake."""
    problems: list[Problem | str] = []
    profiles = _profiles(config, here, problems)
    devices: dict[str, Device] = {}
    rows: list[Performance] = []
    usage: dict[str, float] = {}
    for name, device in config.devices.items():
        devices[name] = device
        profile = None if device.profile is None else profiles.get(device.profile)
        if profile is None:
            continue
        measured = device.processor if device.host and name not in profile.file.devices else name
        if measured not in profile.file.devices:
            how = f"measure it: coserve profile {path}" if device.host is None else f"measure it on {device.worker}"
            problems.append(f"{profile.path}: has no device {measured}; {how}")
            continue
        devices[name] = _completed(measured, device, profile)
        rows += [replace(row, device=name) for row in profile.rows_of(measured)]
        usage = usage or dict(profile.file.usage)
        if not devices[name].expert_memory:
            problems.append(f"{path}: devices.{name}.expert_memory is missing, and {profile.path} recommends none")
    cpu, shared_bytes = devices.get("cpu"), _shared_bytes(devices)
    if cpu is not None and shared_bytes:
        left_bytes = cpu.expert_memory - shared_bytes
        devices["cpu"] = cpu.model_copy(update={"expert_memory": left_bytes})
        if left_bytes <= 0:
            whole, taken = size_text(cpu.expert_memory), size_text(shared_bytes)
            message = f"GPUs with `memory: shared` use {taken} of these {whole}, and none is left for the CPU"
            problems.append(f"{path}: devices.cpu.expert_memory: {message}: raise it, or lower the GPUs' expert_memory")
    return config.model_copy(update={"devices": devices}), Measurements(tuple(rows), usage), problems


def _shared_bytes(devices: Mapping[str, Device]) -> int:
    return sum(device.expert_memory for device in devices.values() if device.memory == "shared")


def pools_and_executors(config: Config) -> tuple[tuple[PoolFacts, ...], tuple[ExecutorFacts, ...]]:
    """Return pools (one per device, one in host memory if a GPU has a `host_cache`) and executors, not divided yet."""
    pools: list[PoolFacts] = []
    executors: list[ExecutorFacts] = []
    for name, device in config.devices.items():
        share = None if device.activation_memory is None else device.activation_memory // device.executors
        processor = "cpu" if (device.processor if device.host else name) == "cpu" else "gpu"
        facts = PoolFacts(PoolId(name), processor, device.expert_memory, device.max_batch, share, device.worker)
        pools.append(facts)
        executors += [ExecutorFacts(ExecutorId(f"{name}/{number}"), PoolId(name)) for number in range(device.executors)]
    cached_bytes = sum(device.host_cache or 0 for device in config.devices.values())
    if cached_bytes:
        pools.append(PoolFacts(RAM, "ram", cached_bytes, 1))
    return tuple(pools), tuple(executors)


def device_problems(config: Config, gpu_count: int) -> list[str]:
    problems = [
        f"devices.{name}: torch sees {gpu_count} such GPUs here: name another device, or install torch for CUDA"
        for name, device in config.devices.items()
        if device.host is None and (gpu := name.removeprefix("cuda:")).isdecimal() and int(gpu) >= gpu_count
    ]
    asked = config.devices.get("cpu", Device()).expert_memory + _shared_bytes(config.devices)
    has = psutil.virtual_memory().total
    if asked > has:
        name = min(name for name, device in config.devices.items() if name == "cpu" or device.memory == "shared")
        message = f"{size_text(asked)} is more than this machine's RAM, {size_text(has)}: lower it"
        problems.append(f"devices.{name}.expert_memory: {message}")
    return problems


def memory_problems(config: Config, used: Sequence[str], catalog: Mapping[ExpertId, ExpertSpec]) -> list[str]:
    """Return experts of the rules (`used`) that fit no pool as the policy divides the memory, with the remedy.

    Only one expert of a chain needs to be resident at a time: the largest expert is what a chain needs.
    """
    pools, _ = partition(*pools_and_executors(config), preset(config.policy))
    room = max((facts for facts in pools if facts.pool != RAM), key=lambda facts: facts.budget_bytes)
    sizes = resident_bytes(catalog.values())
    experts = [ExpertId(expert) for expert in used if ExpertId(expert) in catalog]
    needed = {expert: sizes[catalog[expert].resident.expert] for expert in experts}
    large = sorted(
        (expert for expert, size in needed.items() if size > room.budget_bytes), key=lambda expert: -needed[expert]
    )
    if not large:
        return []
    device, most_bytes = room.device, needed[large[0]]
    shares = sum(facts.device == device for facts in pools)
    who = f"{large[0]} needs"
    if others := len(large) - 1:
        who = f"{large[0]} and {others} other expert{'s' if others > 1 else ''} need up to"
    divided = lower = ""
    if shares > 1:
        whole = size_text(config.devices[device].expert_memory)
        divided = f" (policy {config.policy} divides {whole} over {shares} executors)"
        lower = ", or lower its executors"
    step = 100_000 if most_bytes > 1_000_000 else 1  # what size_text shows of megabytes, rounded up
    at_least = size_text(-(-most_bytes * shares // step) * step)
    has = f"{device} has {size_text(room.budget_bytes)}{divided}"
    need = f"{who} {size_text(most_bytes)}"
    return [f"devices.{device}.expert_memory: {need}; {has}: raise it to at least {at_least}{lower}"]


def profile_warnings(
    path: Path, config: Config, measured: Measurements, catalog: Mapping[ExpertId, ExpertSpec]
) -> list[str]:
    """Return what the profiles of `path` lack: layouts of the catalog, whose cost is assumed, copies from RAM."""
    warnings: list[str] = []
    advice = f"measure it: coserve profile {path}"
    known = {(row.device, row.architecture): row for row in measured.matrix}
    for name, device in config.devices.items():
        rows = [row for (where, _), row in known.items() if where == name]
        if device.host_cache is not None and all(row.ram_s is None for row in rows):
            effect = "is not used" if rows else "is used, and what a copy from there costs is assumed"
            warnings.append(f"devices.{name}.host_cache {effect}: no such copy was measured; {advice}")
        if device.profile is None:
            continue
        layouts = {spec.resident.layout for spec in catalog.values() if spec.classes}
        missing = sorted(layout for layout in layouts if (name, layout) not in known)
        if missing:
            warnings.append(
                f"{device.profile}: {name} was not measured with {', '.join(missing)}: what it costs is assumed;"
                f" {advice}"
            )
    return warnings


def _profiles(config: Config, here: MachineIdentity, problems: list[Problem | str]) -> dict[Path, Profile]:
    profiles: dict[Path, Profile] = {}
    for path in dict.fromkeys(device.profile for device in config.devices.values() if device.profile):
        try:
            profile = load_profile(path)
        except ConfigError as error:
            problems += error.problems
            continue
        if any(device.host is None and device.profile == path for device in config.devices.values()):
            problems += profile.machine_problems(here)
        profiles[path] = profile
    return profiles


def _completed(name: str, device: Device, profile: Profile) -> Device:
    recommended = profile.file.devices[name]
    values = {key: getattr(recommended, key) for key in _RECOMMENDED if key not in device.model_fields_set}
    update: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    batches = [row.max_batch for row in profile.rows_of(name)]
    if batches and "max_batch" not in device.model_fields_set:
        update["max_batch"] = max(batches)
    return device.model_copy(update=update)
