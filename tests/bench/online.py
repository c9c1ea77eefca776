"""`coserve bench online`: images as a line sends them, at shares of what `coserve` can do: latency and misses."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tests import ROOT
from tools.cli.console import console, fail
from tools.cli.option_values import must_be_architecture

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXAMPLES = ROOT / "tools" / "simulate" / "examples"
EXAMPLE_DEVICE, EXAMPLE_TASK = _EXAMPLES / "device.json", _EXAMPLES / "task.json"

#: First come, first served; the paper; ours.
POLICIES = ("samba", "coserve", "coserve-plus")

#: What fits a terminal of 80 columns; `--json` has everything.
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


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("online")(bench_online)


def bench_online(
    live: Annotated[bool, typer.Option("--live", help="On this machine, real images and experts.")] = False,
    device: Annotated[Path | None, typer.Option(metavar="FILE", help="Simulated: a device file.")] = None,
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
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Latency, deadline misses and unknown verdicts of FCFS, coserve and coserve-plus, Poisson and board by board.

    Simulated on a device and a task file (docs/simulating.md; examples without), at 60, 90, 120 and 150 % of what
    coserve can do; or with --live on this machine (paced disk) at 90 %. Status 1 where a run failed.

    Example: coserve bench online --live
    """
    shares = _shares(loads or (".9" if live else ".6,.9,1.2,1.5"))
    if live:
        from tests.bench.arrivals import OnlineSettings, run_online
        from tests.bench.stage import SideError, Size, default_folder
        from tests.bench.stock import Recipe

        must_be_architecture("--classifier", classifier, "classify")
        must_be_architecture("--detector", detector, "detect")
        size = Size(Recipe(experts, detectors, classifier, detector, input_size), requests, memory, 2, 2, limit_s)
        settings = OnlineSettings(folder or default_folder(), size, shares, deadline_s)
        with tempfile.TemporaryDirectory(prefix="coserve-bench-") as scratch:
            try:
                title, rows = run_online(settings, Path(scratch), POLICIES)
            except SideError as error:
                fail(str(error), status=1)
    elif (device is None) == (task is None):
        title, rows = _simulated(device or EXAMPLE_DEVICE, task or EXAMPLE_TASK, shares, deadline_s)
    else:
        fail("name a device and a task, or neither: without both the examples are simulated", status=2)
    _show(title, rows)
    if json_file is not None:
        json_file.write_text(json.dumps({"title": title, "rows": rows}, indent=2) + "\n", encoding="utf-8")


def _simulated(
    device_file: Path, task_file: Path, shares: "Sequence[float]", deadline_s: float
) -> tuple[str, list[dict[str, Any]]]:
    from tools.simulate.engine import StuckError, simulate
    from tools.simulate.files import FileError, read_device, read_task
    from tools.simulate.online import at_once, online_rows
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


def _show(title: str, rows: list[dict[str, Any]]) -> None:
    from tools.bench.tables import print_narrow

    shown = [name for name in rows[0] if name in _COLUMNS]
    print_narrow(title, [_COLUMNS[name] for name in shown], [[row[name] for name in shown] for row in rows])
    console.print(
        "latencies (from arrival to verdict) and waits are of runs without deadlines; unknown (no verdict in time) of"
        " runs with them"
    )


def _shares(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        fail(f"--loads {text}: expected numbers with commas between, such as .6,.9", status=2)
    if not all(share > 0 for share in found):
        fail(f"--loads {text}: a share must be above 0", status=2)
    return found
