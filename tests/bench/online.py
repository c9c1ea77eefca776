"""`coserve bench online`: images as a line sends them, at shares of the rate of `coserve`: latency and misses."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tests import ROOT
from tests.bench.options import chosen_devices
from tests.bench.tables import print_narrow
from tools.terminal.console import console, errors, fail
from tools.terminal.option_values import JsonFile, must_be_architecture

if TYPE_CHECKING:
    from tests.bench.live.expert_files import Disk
    from tests.bench.live.image_trace import Arrivals, ImageOrder
    from tests.bench.live.sides import LiveOptions, LiveSetup, SideInput, SideResult

_EXAMPLES = ROOT / "tools" / "simulate" / "examples"
#: First come, first served; the paper; ours.
POLICIES = ("samba", "coserve", "coserve-plus")
#: The images of each kind of arrivals: single images by usage, whole boards in placement order.
_ORDERS: "dict[Arrivals, ImageOrder]" = {"poisson": "skewed", "bursty": "board"}
#: Columns that fit a terminal of 80; `--json` has everything.
_COLUMNS = {
    "policy": "policy",
    "arrivals": "arrivals",
    "load": "load",
    "images_per_s": "images/s",
    "p50_s": "p50 s",
    "p95_s": "p95 s",
    "p99_s": "p99 s",
    "longest_wait_s": "longest",
    "finished": "finished",
    "unknown_share": "unknown",
    "late_share": "late",
}

Rows = list[dict[str, Any]]


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("online")(bench_online)


def bench_online(
    live: Annotated[bool, typer.Option("--live", help="On this machine, real images and experts.")] = False,
    device: Annotated[
        list[str] | None, typer.Option(help="Simulated: a device file. Live: cpu, cuda:0, …; may be given again.")
    ] = None,
    task: Annotated[Path | None, typer.Option(metavar="FILE", help="Simulated: a task file.")] = None,
    loads: Annotated[
        str | None, typer.Option(help="Shares of coserve's saturated throughput; .6,.9,1.2,1.5, live: .9.")
    ] = None,
    deadline_s: Annotated[float, typer.Option(min=0.1, help="Seconds from an image's arrival to its verdict.")] = 20.0,
    folder: Annotated[Path | None, typer.Option("--dir", help="Live: the experts' folder; a cache folder.")] = None,
    experts: Annotated[int, typer.Option(min=1, help="Live: classifiers.")] = 60,
    detectors: Annotated[int, typer.Option(min=1, help="Live: detectors that they share.")] = 4,
    classifier: Annotated[str, typer.Option(help="Live: the classifiers' architecture.")] = "resnet101",
    detector: Annotated[str, typer.Option(help="Live: the detectors' architecture.")] = "yolo11m",
    input_size: Annotated[int, typer.Option(min=32, help="Live: side of the square input, pixels.")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="Live: images of each run.")] = 600,
    memory: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Live: memory, a share of the experts' bytes.")
    ] = 0.1,
    limit_s: Annotated[float, typer.Option(min=1.0, help="Live: a run ends so long after its last image.")] = 60.0,
    json_file: JsonFile = None,
) -> None:
    """Latency, deadline misses and unknown verdicts of FCFS, coserve and coserve-plus, Poisson and board by board.

    Simulated on a device and a task file (docs/simulating.md; examples without), at 60, 90, 120 and 150 % of the
    rate of coserve; or with --live on this machine (paced disk) at 90 %. Status 1 where a run failed.

    Example: coserve bench online --live
    """
    shares = _shares(loads or (".9" if live else ".6,.9,1.2,1.5"))
    if live:
        from tests.bench.live.expert_files import ExpertRecipe
        from tests.bench.live.sides import LiveOptions, default_folder

        must_be_architecture("--classifier", classifier, "classify")
        must_be_architecture("--detector", detector, "detect")
        recipe = ExpertRecipe(experts, detectors, classifier, detector, input_size)
        options = LiveOptions(
            folder or default_folder(), recipe, requests, memory, limit_s, devices=chosen_devices(device)
        )
        title, rows = _measured(options, shares, deadline_s)
    elif (device is None) == (task is None):
        device_file, task = Path(device[0]) if device else _EXAMPLES / "device.json", task or _EXAMPLES / "task.json"
        title, rows = _simulated(device_file, task, shares, deadline_s)
    else:
        fail("name a device and a task, or neither: without both the examples are simulated", status=2)
    columns = [name for name in rows[0] if name in _COLUMNS]
    print_narrow(title, [_COLUMNS[name] for name in columns], [[row[name] for name in columns] for row in rows])
    console.print(
        "latencies (from arrival to verdict) and waits are of runs without deadlines; unknown (no verdict in time) of"
        " runs with them"
    )
    if json_file is not None:
        json_file.write_text(json.dumps({"title": title, "rows": rows}, indent=2) + "\n", encoding="utf-8")


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        fail(f"--loads {text}: expected numbers with commas between, such as .6,.9", status=2)
    if not all(share > 0 for share in shares):
        fail(f"--loads {text}: a share must be above 0", status=2)
    return shares


def _simulated(device_file: Path, task_file: Path, shares: Sequence[float], deadline_s: float) -> tuple[str, Rows]:
    from tests.bench.simulated_arrivals import at_once, online_rows
    from tools.simulate.engine import StuckError, simulate
    from tools.simulate.files import FileError, read_device, read_task
    from tools.simulate.world import machine_of, task_of

    try:
        device, task = read_device(device_file), task_of(read_task(task_file))
        machines = {name: machine_of(device, task, name) for name in POLICIES}
        saturated = simulate(machines["coserve"], at_once(task), "coserve")
        saturated_per_s = saturated.images / saturated.makespan_s
        rows = list(online_rows(machines, task, saturated_per_s, shares, ("poisson", "bursty"), deadline_s))
    except (FileError, ValueError, StuckError) as error:
        fail(str(error), status=2)
    title = f"{task.name} on {device.name}, simulated: coserve saturated {saturated_per_s:.2f} images/s"
    return f"{title}, deadline {deadline_s:g} s", [asdict(row) for row in rows]


def _measured(options: "LiveOptions", shares: Sequence[float], deadline_s: float) -> tuple[str, Rows]:
    from tests.bench.live.sides import prepare
    from tests.bench.processes import RunError
    from tools.terminal.progress import Bars

    with tempfile.TemporaryDirectory(prefix="coserve-bench-") as scratch, Bars(console=errors) as bar:
        task = bar.add_task("preparing", total=len(_ORDERS) * (1 + len(shares) * len(POLICIES) * 2))
        try:
            setup = prepare(options, Path(scratch), lambda step: bar.update(task, description=step))

            def run(work: "SideInput") -> "SideResult":
                deadline = "" if work.deadline_s is None else ", deadlines"
                bar.update(task, description=f"{work.trace.order}, {work.side}{deadline}")
                result = setup.run(work)
                bar.advance(task)
                return result

            saturated, rows = live_rows(setup, shares, deadline_s, run)
        except RunError as error:
            fail(str(error), status=1)
    rates = ", ".join(f"{arrivals} {rate:.2f}" for arrivals, rate in saturated.items())
    return f"live, paced disk: coserve saturated (images/s): {rates}; deadline {deadline_s:g} s", rows


def live_rows(
    setup: "LiveSetup",
    shares: Sequence[float],
    deadline_s: float,
    run: "Callable[[SideInput], SideResult]",
    disk: "Disk" = "paced",
    kinds: "Sequence[Arrivals]" = tuple(_ORDERS),
    policies: Sequence[str] = POLICIES,
) -> "tuple[dict[Arrivals, float], Rows]":
    """Return coserve's saturated throughput by kind of arrivals, and rows: each of a run without deadlines and one
    with. The rows have the columns of `OnlineRow`; `finished` is the share of images that ended.
    """
    rows: Rows = []
    saturated: dict[Arrivals, float] = {}
    for arrivals in kinds:
        waiting = setup.trace(_ORDERS[arrivals])
        saturated[arrivals] = run(setup.side_input("coserve", waiting, disk)).images_per_s
        for share in shares:
            trace = waiting.arriving(share * saturated[arrivals], arrivals)
            limit_s = trace.images[-1].arrives_s + setup.options.limit_s
            for policy in policies:
                side = "samba-slots" if policy == "samba" else policy
                work = replace(setup.side_input(side, trace, disk), limit_s=limit_s, enough_images=None)
                free, limited = run(work), run(replace(work, deadline_s=deadline_s))
                rows.append(
                    {"policy": policy, "arrivals": arrivals, "load": share} | _row(free, limited, len(trace.images))
                )
    return saturated, rows


def _row(free: "SideResult", limited: "SideResult", images: int) -> dict[str, Any]:
    import numpy as np

    p50_s, p95_s, p99_s = (round(float(each), 2) for each in np.quantile(free.latencies_s or [0.0], (0.5, 0.95, 0.99)))
    return {
        "images_per_s": round(free.images_per_s, 2),
        "p50_s": p50_s,
        "p95_s": p95_s,
        "p99_s": p99_s,
        "longest_wait_s": round(max(free.waits_s, default=0.0), 2),
        "finished": round(free.images / images, 3),
        "unknown_share": round((limited.unknown + images - limited.images) / images, 4),
        "loads": free.loads,
    }
