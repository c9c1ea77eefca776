"""The parts that all runs of the live benchmark share, and a process of its own for each run."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from daemon.policy.matrix import Performance
from daemon.policy.presets import PRESETS
from experts.memory import HostMemory
from experts.reading import DirectReader
from experts.spec import ArchitectureId, ExpertId, ExpertSpec
from experts.vision.slot import LayoutShelf
from tests import ROOT
from tests.bench.live.expert_files import (
    PACED_BYTES_PER_S,
    Disk,
    ExpertRecipe,
    make_experts,
    make_pictures,
    read_experts,
)
from tests.bench.live.image_trace import ImageOrder, ImageTrace, make_trace, make_types
from tools.bench.loading import read_seconds
from tools.profile.measure import Bench
from tools.profile.samples import Samples
from tools.simulate.fit import fit_line, largest_useful_batch
from tools.terminal.console import quiet_start

ORDINARY, NAIVE, RAY = "samba-ordinary", "naive", "ray-serve"
#: The sides that are not policies of CoServe.
OTHER_SIDES = (ORDINARY, NAIVE, RAY)
SIDES = (*PRESETS, *OTHER_SIDES)

_PICTURES = 120
_SEED = 17
_BATCHES = (1, 2, 4, 8, 16)
_BATCH_ROUNDS = 5
_READ_FILES = 6
#: Seconds of a side's process beside its run: imports, the initial fill, a cluster's start.
_AROUND_A_RUN_S = 240.0
#: Sides of which only the whole trace shows the rate may take so many times the limit.
_WHOLE_TRACE = 10

T = TypeVar("T")
R = TypeVar("R")


class SideError(Exception):
    """A side's process failed; the text is the end of its output."""


def serves_in_order(side: str) -> bool:
    """Return True if a side serves images as they come, so that a part of a run shows the rate of the whole.

    A side that groups images serves the popular experts first: only the whole trace shows how fast it is. Ray Serve's
    router groups too, for it prefers a replica that has the model.
    """
    if side in OTHER_SIDES:
        return side != RAY
    return PRESETS[side].binding == "arrival" and PRESETS[side].arrange == "last"


def default_folder() -> Path:
    """Return the folder in which experts are kept between benchmarks."""
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "coserve" / "bench"


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Sizes that are the same for every side. After `limit_s` sides that serve images as they come are stopped."""

    folder: Path
    recipe: ExpertRecipe
    requests: int
    memory_share: float
    limit_s: float
    executors: int = 2
    threads: int = 2


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """Costs of a batch while all executors compute; `disk_s` in them is of the cold disk.

    `residuals` are the largest relative errors of the fits by architecture; `read_method` names how files were read.
    """

    rows: tuple[Performance, ...]
    residuals: dict[str, float]
    cold_bytes_per_s: float
    read_method: str

    def bytes_per_s(self, disk: Disk) -> float:
        return self.cold_bytes_per_s if disk == "cold" else min(PACED_BYTES_PER_S, self.cold_bytes_per_s)


@dataclass(frozen=True, slots=True)
class SideInput:
    """One run of one side. `pictures` are pairs: the JPEG that stops after its classifier, and the one that goes on.

    `memory_bytes` is for experts, in all; `executors` and `threads` are of the whole side: a side with one executor
    has all threads. After `limit_s` the side is stopped and the images that it finished count. `record` is a file for
    a trace of the scheduler's decisions, `disk_lock` a file that processes lock while they read an expert.
    """

    side: str
    trace: ImageTrace
    catalog: Path
    pictures: list[tuple[bytes, bytes]]
    memory_bytes: int
    disk: Disk
    limit_s: float
    disk_lock: Path
    executors: int = 2
    threads: int = 2
    costs: tuple[Performance, ...] = ()
    deadline_s: float | None = None
    record: Path | None = None

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
    of the images that ended. `loads` are those after the initial fill. `failure` names what went wrong with images.
    """

    side: str
    images: int
    seconds: float
    stopped: bool
    loads: int
    loaded_bytes: int
    waits_s: tuple[float, ...]
    latencies_s: tuple[float, ...]
    unknown: int = 0
    failure: str = ""

    @property
    def images_per_s(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class LiveSetup:
    """Experts, pictures and measured costs."""

    options: LiveOptions
    scratch: Path
    catalog: Path
    specs: dict[ExpertId, ExpertSpec]
    pictures: list[tuple[bytes, bytes]]
    costs: MachineCosts

    @property
    def memory_bytes(self) -> int:
        """The budget of every side; never less than each executor needs for the largest expert."""
        sizes = [spec.weights_bytes for spec in self.specs.values()]
        return max(int(self.options.memory_share * sum(sizes)), max(sizes) * self.options.executors)

    def trace(self, order: ImageOrder) -> ImageTrace:
        """Return the one trace of this order."""
        recipe = self.options.recipe
        types = make_types(recipe.classifier_names, recipe.detector_names)
        return make_trace(types, order, self.options.requests, len(self.pictures), _SEED)

    def side_input(self, side: str, trace: ImageTrace, disk: Disk) -> SideInput:
        slower = self.costs.cold_bytes_per_s / self.costs.bytes_per_s(disk)
        return SideInput(
            side=side,
            trace=trace,
            catalog=self.catalog,
            pictures=self.pictures,
            memory_bytes=self.memory_bytes,
            disk=disk,
            limit_s=self.options.limit_s * (1 if serves_in_order(side) else _WHOLE_TRACE),
            disk_lock=self.scratch / "disk.lock",
            executors=self.options.executors,
            threads=self.options.threads,
            costs=tuple(replace(row, disk_s=row.disk_s * slower) for row in self.costs.rows),
        )

    def run(self, work: SideInput) -> SideResult:
        """Carry out one run in a process of its own, so that each starts with clean memory. Raises SideError."""
        return in_own_process(run_side, work, self.scratch, work.limit_s + _AROUND_A_RUN_S)


def prepare(options: LiveOptions, scratch: Path, on_step: Callable[[str], None]) -> LiveSetup:
    """Make the experts, or find them, render the pictures, and measure the machine. Raises SideError."""
    catalog = make_experts(options.folder.resolve(), options.recipe, lambda name: on_step(f"making {name}"))
    on_step("rendering images")
    pictures = make_pictures(_PICTURES, _SEED)
    on_step("measuring this machine")
    work = (catalog, pictures, options.executors, options.threads)
    costs = in_own_process(_measure_costs, work, scratch, _AROUND_A_RUN_S)
    return LiveSetup(options, scratch, catalog, read_experts(catalog), pictures, costs)


def run_side(work: SideInput) -> SideResult:
    """Run one side; each imports only its own parts."""
    if work.side == NAIVE:
        from tests.bench.live.ordinary import run_naive

        return run_naive(work)
    if work.side == RAY:
        from tests.bench.live.ray_serve import run_ray

        return run_ray(work)
    from tests.bench.live.engine import run_engine

    return run_engine(work)


def in_own_process(function: Callable[[T], R], argument: T, scratch: Path, timeout_s: float) -> R:
    """Return `function(argument)`, computed by a fresh Python process. Raises SideError."""
    call_file, result_file = scratch / "call.pickle", scratch / "result.pickle"
    call_file.write_bytes(pickle.dumps((function, argument)))
    result_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.bench.live.process", str(call_file), str(result_file)]
    environ = quiet_start({"PYTHONPATH": str(ROOT)})
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise SideError(f"did not end within {timeout_s:.0f} s") from error
    if done.returncode or not result_file.is_file():
        raise SideError((done.stderr.strip() or f"exit status {done.returncode}")[-800:])
    return pickle.loads(result_file.read_bytes())  # noqa: S301 - written by our own process


def _measure_costs(work: tuple[Path, list[tuple[bytes, bytes]], int, int]) -> MachineCosts:
    """Measure each architecture with one of its experts, all executors at once (CoServe §4.5), and the cold disk."""
    catalog, pictures, executors, threads = work
    specs = read_experts(catalog)
    samples = Samples(tuple(stops for stops, _ in pictures), "rendered parts")
    shelf = LayoutShelf()
    bytes_per_s, method = _cold_read(list(specs.values()))
    rows: list[Performance] = []
    residuals: dict[str, float] = {}
    for layout, spec in {spec.layout: spec for spec in specs.values()}.items():
        with Bench("cpu", executors, max(1, threads // executors), shelf) as bench:
            line = fit_line(bench.latencies_s(bench.slots(spec), samples, _BATCHES, _BATCH_ROUNDS).items())
        residuals[layout] = line.residual
        max_batch = largest_useful_batch(line, max(_BATCHES))
        disk_s = spec.weights_bytes / bytes_per_s
        rows.append(Performance("cpu", ArchitectureId(layout), line.k_s, line.b_s, max_batch, disk_s=disk_s))
    return MachineCosts(tuple(rows), residuals, bytes_per_s, method)


def _cold_read(specs: list[ExpertSpec]) -> tuple[float, str]:
    """Return the bytes per second of whole files into memory that is there, and how they were read."""
    reader = DirectReader()
    rates: list[float] = []
    for spec in specs[:_READ_FILES]:
        memory = HostMemory(spec.file.stat().st_size)
        memory.array[:] = 0  # pages exist, as a slot's do
        rates.append(memory.array.nbytes / read_seconds(reader, spec.file, memory.view))
    return median(rates), reader.method
