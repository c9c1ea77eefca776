"""`coserve profile`: all that is measured of a line on this machine, as one file that the daemon loads."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import yaml

from daemon.config.settings import Device
from daemon.dispatch.torch_devices import shelf_of
from daemon.line.line import Line
from daemon.line.profile import ProfileFile, this_machine
from daemon.policy.predict import expert_facts
from daemon.units import size_text
from experts.catalog import UNREADABLE
from experts.durable import replace_durably
from experts.spec import ExpertSpec, LayoutId, resident_in
from experts.vision.slot import LayoutShelf
from tools.profile.measure import Bench, LayoutCost, Pair, ProfileEffort, ProfileError, best, measure_layout, try_pairs
from tools.profile.samples import Samples
from tools.profile.split import Plan, Split, search_split

#: Share of a machine's free memory that a line without a budget may take.
_FREE_SHARE = 0.8

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """`memory_bytes` of each device are for experts and batches; None: as configured."""

    samples: Samples
    memory_bytes: int | None = None
    effort: ProfileEffort = field(default_factory=ProfileEffort)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device, its memory divided by the search in simulated time (`split`); another PC's is not divided."""

    device: str
    pairs: tuple[Pair, ...]
    chosen: Pair
    costs: tuple[LayoutCost, ...]
    expert_bytes: int
    batches_bytes: int
    split: Split | None


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """The whole profile; `skipped` are devices of other PCs that could not be measured, with the reason."""

    devices: tuple[DeviceProfile, ...]
    samples: str
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])


def profile_line(line: Line, wish: Wish, on_progress: Progress) -> MeasuredProfile:
    """Measure every layout on every configured device: minutes. Raises ProfileError, ExpertError."""
    layouts = one_of_each(line)
    shelf = shelf_of(line.config.devices)
    own = {name: settings for name, settings in line.config.devices.items() if settings.host is None}
    devices = tuple(own)
    stages, begun = len(devices) * (len(layouts) + 2), count()

    def begin(what: str) -> None:
        on_progress(next(begun) / stages, what)

    # Now: later, memory that torch keeps for its next batches would count as used.
    memory_bytes = {device: wish.memory_bytes or memory_to_divide(device, settings) for device, settings in own.items()}
    profiles = [_profile_device(device, memory_bytes[device], line, layouts, wish, shelf, begin) for device in devices]
    on_progress(1.0, "measured")
    return MeasuredProfile(tuple(profiles), wish.samples.origin)


def one_of_each(line: Line) -> dict[LayoutId, ExpertSpec]:
    """Return an expert for each layout of the catalog, the most used layout first. Raises ProfileError for none."""
    usage: dict[LayoutId, float] = {}
    examples: dict[LayoutId, ExpertSpec] = {}
    resident = resident_in(line.catalog)
    for facts in expert_facts(line.catalog.values(), line.routes):
        spec = resident[facts.expert]
        if spec.layout != UNREADABLE:
            examples.setdefault(spec.layout, spec)
            usage[spec.layout] = usage.get(spec.layout, 0.0) + facts.usage
    if not examples:
        raise ProfileError(f"{line.config.catalog}: names no expert whose weights can be read; see `coserve check`")
    return dict(sorted(examples.items(), key=lambda item: (-usage[item[0]], item[0])))


def _profile_device(
    device: str,
    memory_bytes: int,
    line: Line,
    layouts: dict[LayoutId, ExpertSpec],
    wish: Wish,
    shelf: LayoutShelf,
    begin: Callable[[str], None],
) -> DeviceProfile:
    busiest = next(iter(layouts.values()))
    begin(f"{device}: executors")
    pairs = try_pairs(device, busiest, wish.samples, wish.effort, shelf)
    pair = best(pairs)
    costs: list[LayoutCost] = []
    for layout, spec in layouts.items():
        begin(f"{device}: {layout}")
        with Bench(device, pair.executors, pair.threads, shelf) as bench:
            costs.append(measure_layout(bench, device, spec, wish.samples, wish.effort, shelf))
    begin(f"{device}: memory")
    specs = [spec for spec in line.catalog.values() if spec.layout != UNREADABLE]
    plan = Plan(
        device=device,
        memory_bytes=memory_bytes,
        executors=pair.executors,
        rows=tuple(cost.row for cost in costs),
        experts=expert_facts(specs, line.routes),
        policy=line.config.policy,
    )
    if plan.max_experts() == 0:
        needed = plan.largest_expert_bytes + plan.least_batches_bytes
        raise ProfileError(
            f"{device}: {size_text(plan.memory_bytes)} hold no expert beside one image per executor, which takes"
            f" {size_text(needed)}; give it more (--memory, or expert_memory in the configuration)"
        )
    split = search_split(plan)
    return DeviceProfile(device, tuple(pairs), pair, tuple(costs), *plan.division(split.experts), split)


def memory_to_divide(device: str, settings: Device) -> int:
    """Return bytes for experts and batches: as configured, or most of what is free on the device."""
    if settings.expert_memory:
        return settings.expert_memory + (settings.activation_memory or 0)
    if device == "cpu":
        return int(psutil.virtual_memory().available * _FREE_SHARE)
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes * _FREE_SHARE)


def as_document(measured: MeasuredProfile) -> dict[str, Any]:
    """Return the file's content, checked against what the daemon reads."""
    document: dict[str, Any] = {
        "profile": 1,
        "made": datetime.now(UTC).replace(microsecond=0).isoformat(),
        "machine": this_machine().model_dump(mode="json"),
        "devices": {device.device: _device_entry(device) for device in measured.devices},
    }
    ProfileFile.model_validate(document)
    return document


def write_profile(path: Path, measured: MeasuredProfile) -> None:
    head = (
        f"# Made by `coserve profile` with {measured.samples}. Seconds: a batch of n images takes k_s * n + b_s.\n"
        "# Settings in coserve.yaml override these.\n"
    )
    text = yaml.safe_dump(as_document(measured), sort_keys=False, allow_unicode=True, width=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, head + text)


def _device_entry(profile: DeviceProfile) -> dict[str, Any]:
    architectures: dict[str, Any] = {}
    for cost in profile.costs:
        row = asdict(cost.row) | {"residual": round(cost.residual, 4)}
        architectures[str(row.pop("architecture"))] = row
        del row["device"]
        # Six significant digits: microseconds matter, femtoseconds do not.
        times = ("k_s", "b_s", "disk_s", "ram_s")
        row |= {name: float(f"{row[name]:.6g}") for name in times if row[name] is not None}
    return {
        "executors": profile.chosen.executors,
        "threads": profile.chosen.threads,
        "expert_memory": profile.expert_bytes or None,
        "activation_memory": profile.batches_bytes or None,
        "architectures": architectures,
    }
