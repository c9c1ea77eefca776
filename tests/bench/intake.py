"""`coserve bench intake`: images a second that become durable, beside the raw disk, idle and beside inference."""

import os
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tests.bench.tables import print_rows
from tools.terminal.console import AsJson, console, errors, fail, print_json

if TYPE_CHECKING:
    from tests.bench.intake_runs import Flood, Plan, Steady

_DELAY = "5 ms more a sync"


def bench_intake(
    kilobytes: Annotated[
        list[float] | None, typer.Option(min=1, help="Bytes of an image in thousands; repeat. [20 and 100]")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of each measurement.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each kind, interleaved; the median counts.")] = 5,
    rate: Annotated[float, typer.Option(min=1.0, help="Images a second of the open loop.")] = 300.0,
    executors: Annotated[int, typer.Option(min=1, help="Executors that inference is saturated with.")] = 2,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="FOLDER", help="On the disk to measure; temporary files go there."),
    ] = None,
    delayed: Annotated[bool, typer.Option(help="Also with 5 ms added to each sync (needs a C compiler).")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure accepted images per second of a real daemon with real sockets, beside raw group commits of its disk.

    Raw: groups of the writer's size, each one write and one fdatasync; then the same with a transaction of bare rows.
    Exit status 1 if it could not be measured.

    Example: coserve bench intake --folder /var/lib/coserve
    """
    image_sizes = [int(size * 1000) for size in kilobytes or (20, 100)]
    if folder is not None and not folder.is_dir():
        fail(f"no folder {folder}", status=2)
    from tests.bench.intake_runs import Plan

    with tempfile.TemporaryDirectory(prefix="coserve-bench-", dir=folder) as scratch:
        plan = Plan(Path(scratch), image_sizes, seconds, rounds, rate, executors)
        floods, steady = _measure(plan, delayed=delayed)
    groups = {size: plan.group(size) for size in image_sizes}
    if as_json:
        facts = {"machine": platform.platform(), "cores": os.cpu_count(), "seconds": seconds, "rounds": rounds}
        facts |= {"executors": executors, "raw_groups": groups}
        print_json({**facts, "floods": [asdict(row) for row in floods], "steady": [asdict(row) for row in steady]})
    else:
        print_rows(f"As many as are taken, idle; medians of {rounds} rounds", [asdict(row) for row in floods])
        print_rows("At a steady rate", [asdict(row) for row in steady])
        console.print(
            f"raw: a loop of one pwritev and one fdatasync for each {' or '.join(map(str, groups.values()))} images, no"
            " sockets, checks or hashes; with rows: then one SQLite transaction of bare rows\n"
            "idle: a daemon that judges nothing; saturated: executors that always have full batches; latency from when"
            f" an image is due to its answer, all rounds together; {os.cpu_count()} cores",
            markup=False,
        )


def _measure(plan: "Plan", *, delayed: bool) -> "tuple[list[Flood], list[Steady]]":
    from tests.bench.intake_runs import Bench, BenchError
    from tests.faults.shim import ShimError, shim_environment
    from tools.setup.service import ServiceError
    from tools.terminal.console import Bars

    try:
        disks: dict[str, dict[str, str]] = {"as it is": {}}
        if delayed:
            disks[_DELAY] = shim_environment(["sync:delay=5"])
        with Bars(console=errors) as bar:
            task = bar.add_task("experts", total=None)
            bench = Bench(plan, lambda what: bar.update(task, description=what))
            floods = [bench.flood(size, disk, faults) for size in plan.sizes for disk, faults in disks.items()]
            steady = [bench.steady_idle(size) for size in plan.sizes]
            steady += [bench.steady_saturated(size) for size in plan.sizes]
    except (BenchError, ServiceError, ShimError, OSError, ValueError) as error:
        fail(f"could not measure: {error}", status=1)
    return floods, steady
