"""The stages of `make gpu`: each measures one thing and keeps its tables as it goes."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from daemon.line.profile import this_machine
from daemon.units import size_text
from tests import ROOT
from tests.bench.live.expert_files import ExpertRecipe
from tests.bench.live.image_trace import ImageOrder
from tests.gpu.expert_files import make_expert_files
from tests.gpu.page import Table
from tools.setup.doctor import find_driver

Keep = Callable[[Table], None]
_DEADLINE_S = 20.0


class NoGpuError(Exception):
    """A device of the plan is not here, or no longer; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of everything. `devices`: the GPU and the CPU; `budgets`: bytes for experts on each."""

    devices: tuple[str, ...] = ("cuda:0", "cpu")
    budgets: tuple[int, ...] = (12_000_000_000, 4_000_000_000)
    recipe: ExpertRecipe = field(default_factory=lambda: ExpertRecipe(352, 8, "resnet101", "yolo11m", 224))
    load_networks: tuple[str, ...] = ("resnet101",)
    networks: tuple[str, ...] = ("resnet101", "yolo11m")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batches: tuple[int, ...] = (1, 8, 32)
    rounds: int = 3
    making_s: float = 200.0
    requests: int = 800
    online_requests: int = 300
    tests: tuple[str, ...] = ("tests/experts",)
    boards: int = 6
    executors: int = 2
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    run_s: float = 40.0

    @property
    def gpu(self) -> str:
        return self.devices[0]


#: The same steps in a minute or two, on a simulated GPU.
DRY_RUN = Plan(
    devices=("sim:0", "cpu"),
    budgets=(100_000_000, 100_000_000),
    recipe=ExpertRecipe(3, 1, "resnet18", "yolo11n", 32),
    load_networks=("resnet18",),
    networks=("resnet18",),
    dtypes=("float32",),
    batches=(1, 2),
    rounds=1,
    making_s=60.0,
    requests=24,
    online_requests=24,
    tests=("tests/experts/test_memory.py",),
    boards=1,
)


def machine_facts(plan: Plan) -> dict[str, str]:
    """Return what the page says of the machine."""
    import torch

    machine, driver = this_machine(), find_driver()
    gpus = [f"{gpu.name}, {size_text(gpu.total_bytes)}" for gpu in driver.gpus] if driver else []
    return {
        "GPU": "simulated on the CPU: no figure here is a GPU's" if plan is DRY_RUN else ", ".join(gpus) or "none",
        "driver": "none" if driver is None else f"{driver.version}, CUDA {'.'.join(map(str, driver.cuda))}",
        "torch": f"{torch.__version__}, built for {torch.version.cuda or 'processors only'}",
        "processor": f"{machine.cpu}, {machine.cores} cores",
        "RAM": size_text(machine.memory_bytes),
    }


def must_answer(device: str) -> None:
    """Raise NoGpuError where the device computes nothing (any more)."""
    import torch

    if not device.startswith("cuda"):
        return
    try:
        if not torch.cuda.is_available():
            raise NoGpuError(
                f"torch {torch.__version__} sees no CUDA device: `nvidia-smi` says whether a driver answers"
            )
        total = int(torch.arange(100, device=device).sum())
    except RuntimeError as error:
        raise NoGpuError(f"{device} does not answer: {error}") from error
    if total != 4950:
        raise NoGpuError(f"{device} adds 0 to 99 to {total}: it is broken")


def run_tests(plan: Plan, folder: Path, keep: Keep) -> None:
    """Run the tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default"]
    command += ["--continue-on-collection-errors", *plan.tests]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    counted = {
        kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)\b", done.stdout)
    }
    if not counted:
        raise RuntimeError("pytest ran no test: see above")
    keep(Table("Tests marked gpu", [counted]))
    if done.returncode:
        raise RuntimeError(f"pytest ended with status {done.returncode}")


def measure_loads(plan: Plan, folder: Path, keep: Keep) -> None:
    """Measure loads of one expert into each device, beside the raw channel and ordinary ways."""
    from tests.bench.devices import bench_shelf
    from tests.bench.load import measure_loads

    for dtype in plan.dtypes:
        result = measure_loads(list(plan.load_networks), dtype, plan.rounds, folder, plan.devices, bench_shelf())
        for device in plan.devices:
            rows = [asdict(each) for each in result["figures"] if each.device == device]
            title = f"{', '.join(plan.load_networks)}, {dtype}, into {device}"
            keep(Table(title, rows, [f"Cold reads: {result['cold_reads']}; medians of {plan.rounds} rounds."]))


def measure_batches(plan: Plan, folder: Path, keep: Keep) -> None:
    """Measure batches through slots beside eager torch, then executors at once."""
    import torch

    from tests.bench.compute import compare_network, random_expert
    from tests.bench.devices import bench_shelf
    from tools.profile.measure import ProfileEffort, cores, try_pairs
    from tools.profile.samples import drawn_samples

    torch.set_num_threads(cores())
    samples, shelf = drawn_samples(), bench_shelf()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for device in plan.devices:
            rows = [
                asdict(each) | {"images_per_s": each.batch / each.batch_ms * 1e3}
                for name in plan.networks
                for each in compare_network(
                    name, plan.batches, plan.dtypes, plan.rounds, samples, Path(scratch), device, shelf
                )
            ]
            note = "plain: eager torch, float32, NCHW; eager: channels-last in the slot's dtype; slots, named by dtype."
            keep(Table(f"Pixels to answers, {device}", rows, [note]))
        spec = random_expert(plan.networks[0], plan.dtypes[-1], samples, Path(scratch))
        pairs = try_pairs(plan.gpu, spec, samples, ProfileEffort(), shelf)
        title = f"Executors at once on {plan.gpu}: {plan.networks[0]}, {plan.dtypes[-1]}, decoding included"
        keep(Table(title, [asdict(pair) for pair in pairs]))


def make_files(plan: Plan, folder: Path, keep: Keep) -> None:
    """Make the experts."""
    began_s = time.monotonic()
    catalog, distinct = make_expert_files(folder / "experts", plan.recipe, plan.making_s)
    count = plan.recipe.classifiers + plan.recipe.detectors
    files_bytes = sum(file.stat().st_size for file in catalog.parent.glob("*.safetensors"))
    shared = f"{count - distinct} experts read the files of others, past the page cache as all reads:"
    notes = [f"{shared} the disk or {plan.making_s:g} s had room for no more files."] if distinct < count else []
    row = {"experts": count, "files": distinct, "GB": files_bytes / 1e9, "s": time.monotonic() - began_s}
    keep(Table("Experts of random weights", [row], notes))


def _make_missing(plan: Plan, folder: Path) -> None:
    """Make the experts if the stage `experts` has not made them on this machine."""
    marker = folder / "experts" / "recipe.json"
    if not marker.is_file() or json.loads(marker.read_text(encoding="utf-8")) != asdict(plan.recipe):
        make_expert_files(folder / "experts", plan.recipe, plan.making_s)


def run_live(plan: Plan, folder: Path, keep: Keep) -> None:
    """Run sides of the live benchmark on the GPU alone and together with the CPU."""
    from tests.bench.live.comparison import run_cell
    from tests.bench.live.sides import LiveOptions, LiveSetup, prepare

    cells: tuple[tuple[int, ImageOrder, tuple[str, ...]], ...] = (
        (2, "skewed", ("samba-slots", "safetensors-all", "coserve", "coserve-plus")),
        (2, "board", ("coserve", "coserve-plus")),
        (1, "skewed", ("coserve-plus",)),
    )
    setup: LiveSetup | None = None
    _make_missing(plan, folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for count, order, sides in cells:
            devices, budgets = plan.devices[:count], plan.budgets[:count]
            options = LiveOptions(
                folder / "experts", plan.recipe, plan.requests, 1.0, plan.run_s, plan.executors, plan.threads,
                devices=devices, budgets=budgets,
            )  # fmt: skip
            # Costs are of all devices, which the first of these has.
            setup = replace(setup, options=options) if setup else prepare(options, Path(scratch), print)
            cell = run_cell(setup, setup.trace(order), "cold", sides, 1, print)
            names = ("side", "images", "loads", "p50_wait_s", "p95_wait_s", "share_of_bound")
            rows = [
                {name: row[name] for name in names}
                | {"images_per_s": row["images_per_s"] and row["images_per_s"]["median"]}
                for row in map(cell.row, sides)
            ]
            memory = ", ".join(f"{size_text(size)} of {device}" for device, size in zip(devices, budgets, strict=True))
            bound, costs = cell.bound, setup.costs
            sizes = f"{plan.requests} images, all waiting; experts in {memory}; {plan.executors} executors of each."
            limits = f"compute {bound.compute_s:.1f} s, loads {bound.load_s:.1f} s"
            disk = f"the disk reads {size_text(costs.cold_bytes_per_s)}/s ({costs.read_method})"
            notes = [f"{sizes} Bound: {bound.images_per_s:.1f} images/s ({limits}); {disk}."]
            for row in costs.rows:
                if row.device in devices:
                    line = f"{row.k_s * 1e3:.2f} ms per image + {row.b_s * 1e3:.2f} ms per batch"
                    notes.append(f"{row.device}, {row.architecture}: {line}, best from batches of {row.max_batch}.")
            notes += [f"{side} failed: {failure}" for side, failure in cell.failures.items()]
            keep(Table(f"{order}, {' and '.join(devices)}", rows, notes))
            if cell.failures:
                raise RuntimeError(next(iter(cell.failures.values())))


def run_online(plan: Plan, folder: Path, keep: Keep) -> None:
    """Run images that arrive at 90 % of coserve's rate, with deadlines and without."""
    from tests.bench.live.sides import LiveOptions, prepare
    from tests.bench.online import live_rows

    _make_missing(plan, folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        options = LiveOptions(
            folder / "experts", plan.recipe, plan.online_requests, 1.0, plan.run_s, plan.executors, plan.threads,
            devices=plan.devices, budgets=plan.budgets,
        )  # fmt: skip
        setup = prepare(options, Path(scratch), print)
        saturated, rows = live_rows(
            setup, (0.9,), _DEADLINE_S, setup.run, "cold", ("poisson",), ("coserve", "coserve-plus")
        )
    rates = ", ".join(f"{arrivals} {rate:.1f}" for arrivals, rate in saturated.items())
    notes = [f"coserve saturated, images/s: {rates}; deadline {_DEADLINE_S:g} s in the column unknown_share."]
    keep(Table("Arrivals at 90 %", rows, notes))


def run_demo_line(plan: Plan, folder: Path, keep: Keep) -> None:
    """Run the demo's line, real daemon and cameras, on the devices together; a daemon cannot use simulated GPUs."""
    from tests.bench.line import on_devices, run_line
    from tools.camera.render.images import rendered_images
    from tools.demo.line import make_line

    devices = [device for device in plan.devices if not device.startswith("sim:")]
    images = list(rendered_images(plan.boards, 11, "B", lot=None))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        config = make_line(Path(scratch))
        environ = on_devices(config, devices)
        policies = ("samba", "coserve-plus")
        runs = [run_line(config, images, policy, {"COSERVE_POLICY": policy} | environ) for policy in policies]
    keep(Table(f"The demo's line, {' and '.join(devices)}", [asdict(run) for run in runs]))


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. `measure` gets the plan, a folder and what keeps a table; it is stopped after `limit_s`."""

    measure: Callable[[Plan, Path, Keep], None]
    limit_s: float


STAGES: dict[str, Stage] = {
    "tests": Stage(run_tests, 200),
    "load": Stage(measure_loads, 150),
    "compute": Stage(measure_batches, 200),
    "experts": Stage(make_files, 240),
    "live": Stage(run_live, 400),
    "online": Stage(run_online, 210),
    "line": Stage(run_demo_line, 100),
}
