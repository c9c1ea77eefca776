"""`coserve bench ablation`: `coserve-plus` simulated without each of its ideas, in every scenario."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from daemon.policy.presets import WITHOUT
from tests.bench.live.image_trace import PASS_RATE, Arrivals, ImageOrder, arrival_times_s, make_trace, make_types
from tests.bench.options import JsonFile
from tests.bench.paper import SCENARIOS
from tests.bench.tables import print_rows
from tools.simulate.files import DeviceFile, TaskFile, read_device, read_task
from tools.simulate.world import Loading, SimulatedMachine, Task, machine_of, task_of
from tools.terminal.console import fail
from tools.terminal.option_values import must_be_policies

_LIVE, _BYTES = {"c": "resnet101", "d": "yolo11m"}, {"resnet101": 170_600_000, "yolo11m": 80_500_000}
_MACHINES = ("numa", "uma", "one", "live")
_SEED = 7


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy in one scenario. `load` is a share of `coserve`'s throughput with all images waiting; None: all wait.

    `share_of_attainable` is of `attainable_s`; a wait is from an image's arrival to the start of its first batch, a
    latency to its answer, in seconds.
    """

    scenario: str
    loading: Loading
    load: float | None
    arrivals: Arrivals | None
    policy: str
    images_per_s: float
    share_of_bound: float
    share_of_attainable: float
    loads: int
    p95_latency_s: float
    longest_wait_s: float


def live_shape(order: ImageOrder) -> tuple[DeviceFile, Task]:
    """Return the live benchmark's machine and task: costs as measured with both executors busy."""
    types = make_types([f"c{n:02}" for n in range(60)], [f"d{n}" for n in range(4)])
    trace = make_trace(types, order, 600, 1, _SEED)
    usage: dict[str, float] = {each.classifier: each.usage for each in types}
    for each in types:
        if each.detector:
            usage[each.detector] = usage.get(each.detector, 0.0) + PASS_RATE * each.usage
    then = {each.classifier: each.detector for each in types}
    experts = [
        {"id": name, "architecture": _LIVE[name[0]], "bytes": _BYTES[_LIVE[name[0]]], "usage": share}
        | {"then": then.get(name)}
        for name, share in usage.items()
    ]
    requests = [(0.0, image.classifier, image.detector if image.goes_on else None) for image in trace.images]
    costs = {"resnet101": {"k_s": 0.0367, "b_s": 0.0282}, "yolo11m": {"k_s": 0.021, "b_s": 0.0322}}
    total_bytes = sum(_BYTES[_LIVE[name[0]]] for name in usage)
    device = _one_processor("live", total_bytes // 10, 2.0, costs)
    return device, task_of(TaskFile.model_validate({"name": order, "experts": experts, "requests": requests}))


def _one_processor(name: str, memory_bytes: int, concurrency: float, costs: Mapping[str, object]) -> DeviceFile:
    processor = {"memory_bytes": memory_bytes, "executors": 2, "concurrency": concurrency, "max_batch": 8}
    return DeviceFile.model_validate(
        {
            "name": name,
            "channels": {"disk": {"bytes_per_s": 530e6, "fixed_s": 0.9}},
            "processors": {"cpu": processor | {"architectures": costs}},
        }
    )


def scenario(folder: Path, name: str, task_name: str) -> tuple[DeviceFile, Task]:
    """Return a device and a task by name. "one": a processor with two executors and memory for a tenth of the experts.

    Raises FileError.
    """
    if name == "live":
        return live_shape("board" if "board" in task_name else "skewed")
    task = task_of(read_task(folder / f"task-{task_name}.json.gz"))
    if name == "one":
        cost = {"k_s": 0.03, "b_s": 0.02}
        costs = {str(facts.architecture): cost for facts in task.experts}
        return _one_processor("one", sum(each.weights_bytes for each in task.experts) // 10, 1.0, costs), at_once(task)
    return read_device(folder / f"device-{name}.json"), task


def arriving(task: Task, rate_per_s: float, arrivals: Arrivals) -> Task:
    """Return the task whose images arrive at `rate_per_s`: one by one, or a board's worth at once."""
    times_s = arrival_times_s(rate_per_s, arrivals, seed=1)
    return replace(task, images=tuple(replace(image, arrived_s=next(times_s)) for image in task.images))


def at_once(task: Task) -> Task:
    """Return the task with all images waiting from the start."""
    return replace(task, images=tuple(replace(image, arrived_s=0.0) for image in task.images))


def attainable_s(machine: SimulatedMachine, task: Task) -> float:
    """Return seconds below which no policy can finish, given the memory for experts and the arrivals.

    At any time no more is resident than the pools hold: experts with images after that time are read after it.
    """
    from tools.simulate.bound import task_bound

    disk = next(iter(machine.from_disk.values()))[0]
    last_s = {expert: image.arrived_s for image in task.images for expert in image.chain}
    sizes = {facts.expert: facts.weights_bytes for facts in task.experts}
    needed_bytes, least_s = -sum(facts.budget_bytes for facts in machine.pools), task_bound(machine, task).seconds
    for expert in sorted(last_s, key=last_s.__getitem__, reverse=True):
        needed_bytes += sizes[expert]
        least_s = max(least_s, last_s[expert] + needed_bytes / disk.bytes_per_s)
    return least_s


Job = tuple[Path, str, str, Loading, str, float | None, Arrivals | None]


def measure(job: Job) -> Cell:
    """Simulate one cell. `load` is a share of `coserve`'s rate with the same way of loading when all images wait."""
    from tools.simulate.bound import task_bound
    from tools.simulate.engine import Simulation
    from tools.simulate.report import quantile

    folder, name, task_name, loading, policy, load, arrivals = job
    device, task = scenario(folder, name, task_name)
    if load is not None and arrivals is not None:
        full = Simulation(machine_of(device, task, "coserve", loading), at_once(task), "coserve").run()
        task = arriving(task, load * full.images / full.makespan_s, arrivals)
    machine = machine_of(device, task, policy, loading)
    done = Simulation(machine, task, policy).run()
    return Cell(
        f"{name}, {task_name}",
        loading,
        load,
        arrivals,
        policy,
        round(done.images / done.makespan_s, 3),
        round(task_bound(machine, task).seconds / done.makespan_s, 4),
        round(attainable_s(machine, task) / done.makespan_s, 4),
        done.loads,
        round(quantile(done.latencies_s, 0.95), 3),
        round(max(done.waits_s), 3),
    )


def jobs(folder: Path, machines: Sequence[str], policies: Sequence[str]) -> Iterator[Job]:
    """Yield every cell: all images waiting (or one every 4 ms) and online, both ways of loading."""
    for name, task in itertools.product(machines, ("A1", "A1-board")):
        for loading in ("slots", "ordinary"):
            for policy in policies:
                yield folder, name, task, loading, policy, None, None
                arrivals: Arrivals = "bursty" if "board" in task else "poisson"
                for load in (0.9, 1.5):
                    yield folder, name, task, loading, policy, load, arrivals


def bench_ablation(
    folder: Annotated[Path, typer.Option("--dir", help="Folder of device-*.json and task-*.json.gz.")] = SCENARIOS,
    policy: Annotated[list[str] | None, typer.Option(help="Policies; repeat.")] = None,
    machine: Annotated[list[str] | None, typer.Option(help="numa, uma, one, live; repeat.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Simulations at a time.")] = 2,
    json_file: JsonFile = None,
) -> None:
    """Simulate coserve-plus without each of its ideas: throughput with all images waiting, waits online.

    Example: coserve bench ablation --machine numa
    """
    names = policy or ["coserve", "coserve-plus", *(f"coserve-plus-without-{idea}" for idea in WITHOUT)]
    must_be_policies(names)
    machines = machine or list(_MACHINES)
    if unknown := [name for name in machines if name not in _MACHINES]:
        fail(f"--machine {unknown[0]}: expected one of {', '.join(_MACHINES)}", status=2)
    with ProcessPoolExecutor(processes) as pool:
        cells = list(pool.map(measure, jobs(folder, machines, names)))
    for title, rows in tables(cells):
        print_rows(title, rows)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n", encoding="utf-8")


def tables(cells: Sequence[Cell]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield a table for each scenario and way of loading: a row for each policy."""
    for scenario_name, loading in dict.fromkeys((cell.scenario, cell.loading) for cell in cells):
        rows: dict[str, dict[str, Any]] = {}
        for cell in cells:
            if (cell.scenario, cell.loading) != (scenario_name, loading):
                continue
            row = rows.setdefault(cell.policy, {"policy": cell.policy.removeprefix("coserve-plus-")})
            if cell.load is None:
                row |= {"images/s": cell.images_per_s, "loads": cell.loads}
                row |= {"bound": cell.share_of_bound, "attain": cell.share_of_attainable}
            else:
                at = f"{cell.load:.0%}"
                row |= {f"{at} p95 s": cell.p95_latency_s, f"{at} longest s": cell.longest_wait_s}
                row[f"{at} images/s"] = cell.images_per_s
        yield f"{scenario_name}, loads as {loading}", [*rows.values()]
