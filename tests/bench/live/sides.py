"""The parts that all runs of the live benchmark share, and a process of its own for each run."""

import itertools
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from daemon.policy.matrix import Performance
from daemon.policy.presets import PRESETS
from experts.memory import HostMemory
from experts.spec import ArchitectureId, ExpertId, ExpertSpec
from tests.bench.devices import bench_shelf
from tests.bench.live.expert_files import (
    PACED_BYTES_PER_S,
    PLAIN,
    Disk,
    ExpertRecipe,
    make_experts,
    make_pictures,
    read_experts,
)
from tests.bench.live.image_trace import ImageOrder, ImageTrace, make_trace, make_types
from tests.bench.live.libraries import LIBRARIES, CompileWork, compile_all, missing_library
from tests.bench.live.loading import Loading
from tests.bench.loading import read_seconds
from tests.bench.processes import OwnProcesses, RunError
from tests.experts.direct import DirectReader
from tools.profile.measure import Bench, load_seconds
from tools.profile.samples import Samples
from tools.simulate.fit import fit_line, largest_useful_batch


@dataclass(frozen=True, slots=True)
class Side:
    """How requests are scheduled and how experts are loaded.

    `scheduler` is one of our policies by name, a server with one queue (server.py), or Ray Serve. A server's batches
    are of the requests at the head of its queue (`window` 1), of those within the window of all sides ("limited"), or
    of all that wait (None). `max_batch` is less than the executors' where it is given; `store` is the form of the files
    (`coserve import --store`).
    """

    scheduler: str
    loading: Loading
    window: Literal["limited", 1] | None = "limited"
    max_batch: int | None = None
    store: str = PLAIN

    @property
    def is_ours(self) -> bool:
        """Return True if it uses our slots or one of our policies."""
        return self.loading == "slots" or self.scheduler in PRESETS

    @property
    def library(self) -> str:
        """Return the library that must be installed for it."""
        return "ray" if self.scheduler == "ray" else self.loading


SAMBA, PLUS, THIN = "samba", "coserve-plus", "coserve-plus-int8"
#: The sides that are compared, then those that show what each idea brings: slots, batching, scheduling.
COMPARED: dict[str, Side] = {
    SAMBA: Side("server", "ordinary", window=1),
    "safetensors": Side("server", "kept"),
    "safetensors-all": Side("server", "kept", window=None),
    "openvino": Side("server", "openvino"),
    "openvino-all": Side("server", "openvino", window=None),
    "onnxruntime": Side("server", "onnxruntime"),
    "ray-serve": Side("ray", "kept"),
    "ray-slots": Side("ray", "slots"),
    "samba-slots": Side("server", "slots", window=1),
    "samba-batching": Side("server", "ordinary"),
    "samba-scheduling": Side(PLUS, "ordinary", max_batch=1),
    "slots-batching": Side("server", "slots"),
    "coserve": Side("coserve", "slots"),
    PLUS: Side(PLUS, "slots"),
    THIN: Side(PLUS, "slots", store="int8"),
}
#: Each idea added to the one before, and each alone on the base.
LADDER = (SAMBA, "samba-slots", "slots-batching", PLUS)
ALONE = {"slots": "samba-slots", "batching": "samba-batching", "scheduling": "samba-scheduling"}
#: The paper's other policies are run where they are asked for.
SIDES: dict[str, Side] = {
    **COMPARED,
    **{name: Side(name, "slots") for name in PRESETS if name not in COMPARED and not name.startswith("samba")},
}


#: The requests among which a server looks for a batch.
WINDOW = 64
_PICTURES = 120
_SEED = 17
_BATCHES = (1, 2, 4, 8, 16)
_BATCH_ROUNDS = 5
_READ_FILES = 6
_RAM_LOADS = 3
#: Seconds of a side's process beside its run: the initial fill, a cluster's start.
_AROUND_A_RUN_S = 240.0
_COMPILE_S = 3600.0
#: A side that serves images as they come shows its rate by so many of them.
_ENOUGH_IMAGES = 300


def default_folder() -> Path:
    """Return the folder in which experts are kept between benchmarks."""
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "coserve" / "bench"


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Sizes that are the same for every side.

    A side is stopped after `limit_s`; the rate is then over the images that it finished. Each of the `devices` has
    `executors`, and `budgets` bytes for experts; without budgets as many as `memory_share` says.
    """

    folder: Path
    recipe: ExpertRecipe
    requests: int
    memory_share: float = 0.1
    limit_s: float = 600.0
    executors: int = 2
    threads: int = 2
    devices: tuple[str, ...] = ("cpu",)
    budgets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """Costs of a batch while all executors compute; `disk_s` in them is of plain files on the cold disk.

    `read_method` names how files were read.
    """

    rows: tuple[Performance, ...]
    cold_bytes_per_s: float
    read_method: str

    def bytes_per_s(self, disk: Disk) -> float:
        return self.cold_bytes_per_s if disk == "cold" else min(PACED_BYTES_PER_S, self.cold_bytes_per_s)


@dataclass(frozen=True, slots=True)
class SideInput:
    """One run of one side. `pictures` are pairs: the JPEG that stops after its classifier, and the one that goes on.

    `budgets` are bytes for experts of each device, `memory_bytes` all of them; `executors` are of each device,
    `threads` of the CPU's together: a side with one executor has all threads. After `limit_s`, or `enough_images`, the
    side is stopped and the images that it finished count. `disk_lock` is a file that processes lock while they read an
    expert.
    """

    side: str
    trace: ImageTrace
    catalog: Path
    pictures: list[tuple[bytes, bytes]]
    budgets: tuple[int, ...]
    disk: Disk
    limit_s: float
    disk_lock: Path
    executors: int = 2
    threads: int = 2
    costs: tuple[Performance, ...] = ()
    deadline_s: float | None = None
    enough_images: int | None = None
    devices: tuple[str, ...] = ("cpu",)

    @property
    def memory_bytes(self) -> int:
        return sum(self.budgets)

    @property
    def threads_per_executor(self) -> int:
        return max(1, self.threads // self.executors)

    def payload(self, number: int) -> bytes:
        """Return the JPEG of the trace's image `number`."""
        image = self.trace.images[number]
        return self.pictures[image.picture][image.goes_on]


@dataclass(frozen=True, slots=True)
class SideResult:
    """Figures of one run. `seconds` is from the first image's arrival to the last verdict, or to the limit.

    `waits_s` are from an image's arrival to the start of its first expert's batch, `latencies_s` to its verdict, both
    of the images that ended. `loads` are those after the initial fill. `peak_bytes` is the largest memory of its
    processes. `failure` names what went wrong with images.
    """

    side: str
    images: int
    seconds: float
    stopped: bool
    loads: int
    waits_s: tuple[float, ...]
    latencies_s: tuple[float, ...]
    unknown: int = 0
    failure: str = ""
    peak_bytes: int = 0

    @property
    def images_per_s(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class LiveSetup:
    """Experts, pictures and measured costs. `catalogs` by the form of the files; `specs` are of plain ones."""

    options: LiveOptions
    scratch: Path
    catalogs: dict[str, Path]
    specs: dict[ExpertId, ExpertSpec]
    pictures: list[tuple[bytes, bytes]]
    costs: MachineCosts
    processes: OwnProcesses

    @property
    def budgets(self) -> tuple[int, ...]:
        """The budget of each device, the same for every side; never less than each executor needs for any expert."""
        sizes = [spec.weights_bytes for spec in self.specs.values()]
        share_bytes = max(int(self.options.memory_share * sum(sizes)), max(sizes) * self.options.executors)
        return self.options.budgets or (share_bytes,) * len(self.options.devices)

    @property
    def memory_bytes(self) -> int:
        return sum(self.budgets)

    def trace(self, order: ImageOrder) -> ImageTrace:
        """Return the one trace of this order."""
        recipe = self.options.recipe
        types = make_types(recipe.classifier_names, recipe.detector_names)
        return make_trace(types, order, self.options.requests, len(self.pictures), _SEED)

    def side_input(self, side: str, trace: ImageTrace, disk: Disk) -> SideInput:
        bytes_per_s, catalog = self.costs.bytes_per_s(disk), self.catalogs[SIDES[side].store]
        read_bytes = {ArchitectureId(spec.layout): spec.read_bytes for spec in read_experts(catalog).values()}
        return SideInput(
            side=side,
            trace=trace,
            catalog=catalog,
            pictures=self.pictures,
            budgets=self.budgets,
            disk=disk,
            limit_s=self.options.limit_s,
            disk_lock=self.scratch / "disk.lock",
            executors=self.options.executors,
            threads=self.options.threads,
            costs=tuple(replace(row, disk_s=read_bytes[row.architecture] / bytes_per_s) for row in self.costs.rows),
            # Others serve the popular experts first: only the whole trace shows how fast they are.
            enough_images=_ENOUGH_IMAGES if SIDES[side].window == 1 else None,
            devices=self.options.devices,
        )

    def run(self, work: SideInput) -> SideResult:
        """Carry out one run in a process of its own. Raises RunError, at once where a library is not installed."""
        if (missing := missing_library(SIDES[work.side].library)) is not None:
            raise RunError(missing)
        return self.processes.call(run_side, work, work.limit_s + _AROUND_A_RUN_S)


def prepare(
    options: LiveOptions, scratch: Path, on_step: Callable[[str], None], sides: Collection[str] = ()
) -> LiveSetup:
    """Make the experts and what the libraries of `sides` make of them, or find them; render the pictures; measure the
    machine. Raises RunError.
    """
    processes = OwnProcesses(["tests.bench.live.preload"])
    folder, catalogs = options.folder.resolve(), dict[str, Path]()
    for store in {PLAIN, *(SIDES[side].store for side in sides)}:
        recipe, place = replace(options.recipe, store=store), folder if store == PLAIN else folder / store
        catalogs[store] = make_experts(place, recipe, lambda name: on_step(f"making {name}"))
    catalog = catalogs[PLAIN]
    loadings = {SIDES[side].loading for side in sides}
    libraries = tuple(name for name in LIBRARIES if name in loadings and missing_library(name) is None)
    if libraries:
        on_step(f"compiling for {' and '.join(libraries)}")
        processes.call(compile_all, CompileWork(catalog, libraries), _COMPILE_S)
    on_step("rendering images")
    pictures = make_pictures(_PICTURES, _SEED)
    on_step("measuring this machine")
    costs = processes.call(_measure_costs, CostWork(catalog, pictures, options), _AROUND_A_RUN_S)
    return LiveSetup(options, scratch, catalogs, read_experts(catalog), pictures, costs, processes)


def run_side(work: SideInput) -> SideResult:
    """Run one side; each imports only its own parts."""
    scheduler = SIDES[work.side].scheduler
    if scheduler == "server":
        from tests.bench.live.server import run_server

        return run_server(work)
    if scheduler == "ray":
        from tests.bench.live.ray_serve import run_ray

        return run_ray(work)
    from tests.bench.live.engine import run_engine

    return run_engine(work)


class CostWork(NamedTuple):
    catalog: Path
    pictures: list[tuple[bytes, bytes]]
    options: LiveOptions


def _measure_costs(work: CostWork) -> MachineCosts:
    """Measure each architecture with one of its experts, all executors at once (CoServe §4.5), and the cold disk."""
    catalog, pictures, options = work
    executors = options.executors
    specs = read_experts(catalog)
    samples = Samples(tuple(stops for stops, _ in pictures), "rendered parts")
    shelf = bench_shelf(packs=[*options.devices] == ["cpu"])
    bytes_per_s, method = _cold_read(list(specs.values()))
    rows: list[Performance] = []
    layouts = {spec.layout: spec for spec in specs.values()}
    for device, (layout, spec) in itertools.product(options.devices, layouts.items()):
        threads = max(1, options.threads // executors) if device == "cpu" else 1
        with Bench(device, executors, threads, shelf) as bench:
            line = fit_line(bench.latencies_s(bench.slots(spec), samples, _BATCHES, _BATCH_ROUNDS).items())
        _, ram_s = load_seconds(device, spec, _RAM_LOADS, shelf)
        max_batch = largest_useful_batch(line, max(_BATCHES))
        disk_s = spec.weights_bytes / bytes_per_s
        rows.append(Performance(device, ArchitectureId(layout), line.k_s, line.b_s, max_batch, 0, disk_s, ram_s))
    return MachineCosts(tuple(rows), bytes_per_s, method)


def _cold_read(specs: list[ExpertSpec]) -> tuple[float, str]:
    """Return the bytes per second of whole files into memory that is there, and how they were read."""
    reader = DirectReader()
    rates: list[float] = []
    for spec in specs[:_READ_FILES]:
        memory = HostMemory(spec.file.stat().st_size)
        memory.array[:] = 0  # pages exist, as a slot's do
        rates.append(memory.array.nbytes / read_seconds(reader, spec.file, memory.view))
    return median(rates), reader.method
