"""`coserve bench live`: every policy, and the alternatives that a user would pick, on real images and weights files."""

import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from tests.bench.options import DeviceNames, JsonFile, chosen_devices
from tools.terminal.console import console, errors, fail
from tools.terminal.option_values import must_be_one_of

Name = TypeVar("Name", bound=str)
#: Of the quick comparison: the values of ExpertRecipe, images, and memory as a share of the experts' bytes: two experts
#: for each executor, so that one can be read while the other computes.
_QUICK_RECIPE = (16, 2, "resnet18", "yolov8n", 128)
_QUICK_REQUESTS, _QUICK_MEMORY = 100, 0.25


def bench_live(
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where the experts are made once (~45 GB); a cache folder.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small experts and few images: about six minutes.")] = False,
    sides: Annotated[str | None, typer.Option(help="Some sides, with commas between; see docs/benchmarks.md.")] = None,
    traces: Annotated[
        str | None, typer.Option(help="skewed (by usage), board (placement order), or both; quick: skewed.")
    ] = None,
    disks: Annotated[str, typer.Option(help="cold (as it is), paced (530 MB/s), or both.")] = "paced",
    requests: Annotated[int, typer.Option(min=1, help="Images, all waiting from the start.")] = 600,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side, in turn.")] = 3,
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
    from tools.terminal.console import Bars

    folder = folder or default_folder() / ("quick" if quick else "")
    options = LiveOptions(folder, ExpertRecipe(), requests, devices=chosen_devices(device))
    if quick:
        options = replace(
            options, recipe=ExpertRecipe(*_QUICK_RECIPE), requests=_QUICK_REQUESTS, memory_share=_QUICK_MEMORY
        )
        console.print(
            f"quick: {options.recipe.classifiers} small experts, {options.requests} images, memory for"
            f" {_QUICK_MEMORY:.0%} of the bytes; ratios differ from those of large experts, and only the usage-skewed"
            " trace is run where --traces names no other"
        )
    chosen_sides = chosen(sides, tuple(SIDES), "--sides") if sides else tuple(COMPARED)
    orders = chosen(traces or ("skewed" if quick else "skewed,board"), ORDERS, "--traces")
    pairs = list(itertools.product(orders, chosen(disks, DISKS, "--disks")))
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


def chosen(text: str, choices: Sequence[Name], option: str) -> tuple[Name, ...]:
    """Return the names in `text`, with commas between. Leaves with status 2 if one is not known."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        must_be_one_of(option, name, choices)
    return tuple(name for name in choices if name in names)
