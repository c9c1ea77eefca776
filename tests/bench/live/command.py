"""`coserve bench live`: every policy, and the alternatives that a user would pick, on real images and weights files."""

import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from tests.bench.options import DeviceNames, JsonFile, chosen_devices
from tools.terminal.console import console, errors, fail
from tools.terminal.option_values import must_be_architecture, must_be_one_of

Name = TypeVar("Name", bound=str)
#: Of the quick comparison: the values of ExpertRecipe, images, and memory as a share of the experts' bytes: two experts
#: for each executor, so that one can be read while the other computes.
_QUICK_RECIPE = (16, 2, "resnet18", "yolov8n", 128)
_QUICK_REQUESTS, _QUICK_MEMORY = 100, 0.25
Folder = Annotated[Path | None, typer.Option("--dir", help="Where the experts are made once (~45 GB); a cache folder.")]


def bench_live(
    folder: Folder = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small experts and few images: about six minutes.")] = False,
    sides: Annotated[str | None, typer.Option(help="Some sides, with commas between; see docs/benchmarks.md.")] = None,
    traces: Annotated[
        str | None, typer.Option(help="skewed (by usage), board (placement order), or both; quick: skewed.")
    ] = None,
    disks: Annotated[str, typer.Option(help="cold (as it is), paced (530 MB/s), or both.")] = "paced",
    experts: Annotated[int, typer.Option(min=1, help="Classifiers, each its own weights file.")] = 60,
    detectors: Annotated[int, typer.Option(min=1, help="Detectors that they share.")] = 4,
    classifier: Annotated[str, typer.Option(help="The classifiers' architecture.")] = "resnet101",
    detector: Annotated[str, typer.Option(help="The detectors' architecture.")] = "yolo11m",
    input_size: Annotated[int, typer.Option(min=32, help="Side of the square input, pixels.")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="Images, all waiting from the start.")] = 600,
    memory: Annotated[float, typer.Option(min=0.01, max=1.0, help="Memory, as a share of the experts' bytes.")] = 0.1,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side, in turn.")] = 3,
    limit_s: Annotated[float, typer.Option(min=1.0, help="A run is stopped then.")] = 600.0,
    executors: Annotated[int, typer.Option(min=1, help="Executors of every side.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Processor threads of every side, over its executors.")] = 2,
    device: DeviceNames = None,
    json_file: JsonFile = None,
) -> None:
    """Images per second of our policies and of what others would use: one memory budget, one disk, one trace.

    Weights are random; each run has its own process and reads through the same reader. The first run makes the
    experts. Sides of libraries that are not installed say so. Exit status 1 where a side failed.

    Example: coserve bench live --quick
    """
    from tests.bench.live.comparison import LiveCell, live_figures, run_cell, show
    from tests.bench.live.expert_files import DISKS, ExpertRecipe
    from tests.bench.live.image_trace import ORDERS
    from tests.bench.live.libraries import missing_library
    from tests.bench.live.sides import COMPARED, SIDES, LiveOptions, default_folder, prepare
    from tests.bench.processes import RunError
    from tools.terminal.progress import Bars

    must_be_architecture("--classifier", classifier, "classify")
    must_be_architecture("--detector", detector, "detect")
    recipe = ExpertRecipe(experts, detectors, classifier, detector, input_size)
    folder = folder or default_folder() / ("quick" if quick else "")
    if quick:
        recipe, requests, memory = ExpertRecipe(*_QUICK_RECIPE), _QUICK_REQUESTS, _QUICK_MEMORY
        console.print(
            f"quick: {recipe.classifiers} small experts instead of {experts}, {requests} images, memory for"
            f" {memory:.0%} of the bytes; ratios differ from those of large experts, and only the usage-skewed trace is"
            " run where --traces names no other"
        )
    options = LiveOptions(folder, recipe, requests, memory, limit_s, executors, threads, devices=chosen_devices(device))
    chosen_sides = chosen(sides, tuple(SIDES), "--sides") if sides else tuple(COMPARED)
    pairs = list(
        itertools.product(chosen(traces or _traces(quick=quick), ORDERS, "--traces"), chosen(disks, DISKS, "--disks"))
    )
    cells: list[LiveCell] = []
    with tempfile.TemporaryDirectory(prefix="coserve-bench-") as scratch, Bars(console=errors) as bar:
        task = bar.add_task("preparing", total=len(pairs) * len(chosen_sides) * rounds)
        try:
            setup = prepare(options, Path(scratch), lambda step: bar.update(task, description=step), chosen_sides)
        except RunError as error:
            fail(str(error), status=1)

        def next_run(name: str) -> None:
            bar.update(task, description=name, advance=1)

        for order, disk in pairs:
            cells.append(run_cell(setup, setup.trace(order), disk, chosen_sides, rounds, next_run))
            if json_file is not None:  # after each cell: an hour's figures need not be lost with its last run
                figures = live_figures(setup, cells, chosen_sides)
                json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    show(setup, cells, chosen_sides)
    failed = {side for cell in cells for side in cell.failures if missing_library(SIDES[side].library) is None}
    raise SystemExit(1 if failed else 0)


def _traces(*, quick: bool) -> str:
    return "skewed" if quick else "skewed,board"


def chosen(text: str, choices: Sequence[Name], option: str) -> tuple[Name, ...]:
    """Return the names in `text`, with commas between. Leaves with status 2 if one is not known."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        must_be_one_of(option, name, choices)
    return tuple(name for name in choices if name in names)
