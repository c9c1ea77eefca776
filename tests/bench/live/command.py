"""`coserve bench live`: every policy, and the alternatives that a user would pick, on real images and weights files."""

import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from tools.terminal.console import errors, fail
from tools.terminal.option_values import must_be_architecture, must_be_one_of

Name = TypeVar("Name", bound=str)
Folder = Annotated[Path | None, typer.Option("--dir", help="Where the experts are made once (~25 GB); a cache folder.")]


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("live")(bench_live)


def bench_live(
    folder: Folder = None,
    sides: Annotated[str | None, typer.Option(help="All policies, samba-ordinary, naive, ray-serve, or some.")] = None,
    traces: Annotated[str, typer.Option(help="skewed (by usage), board (placement order), or both.")] = "skewed,board",
    disks: Annotated[str, typer.Option(help="cold (as it is), paced (530 MB/s), or both.")] = "cold,paced",
    experts: Annotated[int, typer.Option(min=1, help="Classifiers, each its own weights file.")] = 60,
    detectors: Annotated[int, typer.Option(min=1, help="Detectors that they share.")] = 4,
    classifier: Annotated[str, typer.Option(help="The classifiers' architecture.")] = "resnet101",
    detector: Annotated[str, typer.Option(help="The detectors' architecture.")] = "yolo11m",
    input_size: Annotated[int, typer.Option(min=32, help="Side of the square input, pixels.")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="Images, all waiting from the start.")] = 600,
    memory: Annotated[float, typer.Option(min=0.01, max=1.0, help="Memory, as a share of the experts' bytes.")] = 0.1,
    rounds: Annotated[int, typer.Option(min=1, help="Runs per side; one for those slower than a tenth.")] = 3,
    limit_s: Annotated[
        float, typer.Option(min=1.0, help="Sides that serve images as they come are stopped then.")
    ] = 25.0,
    executors: Annotated[int, typer.Option(min=1, help="Executors of sides that have several.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Processor threads of every side, over its executors.")] = 2,
    record: Annotated[Path | None, typer.Option("--trace", help="Record our policies' runs into this folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Images per second of every policy, of ordinary loading, and of Ray Serve: one memory budget, one trace.

    Weights are random; each side runs in its own process and reads through the same reader. The first run makes the
    experts. The side ray-serve needs `pip install 'ray[serve]'`. Exit status 1 where a side failed.

    Example: coserve bench live --traces skewed --disks paced --sides samba,coserve,coserve-plus
    """
    from tests.bench.live.comparison import LiveCell, live_figures, run_cell, show
    from tests.bench.live.expert_files import DISKS, ExpertRecipe
    from tests.bench.live.image_trace import ORDERS
    from tests.bench.live.sides import SIDES, LiveOptions, SideError, default_folder, prepare
    from tools.terminal.progress import Bars

    must_be_architecture("--classifier", classifier, "classify")
    must_be_architecture("--detector", detector, "detect")
    recipe = ExpertRecipe(experts, detectors, classifier, detector, input_size)
    options = LiveOptions(folder or default_folder(), recipe, requests, memory, limit_s, executors, threads)
    chosen_sides = chosen(sides, SIDES, "--sides")
    pairs = list(itertools.product(chosen(traces, ORDERS, "--traces"), chosen(disks, DISKS, "--disks")))
    cells: list[LiveCell] = []
    with tempfile.TemporaryDirectory(prefix="coserve-bench-") as scratch, Bars(console=errors) as bar:
        task = bar.add_task("preparing", total=len(pairs) * len(chosen_sides) * rounds)
        try:
            setup = prepare(options, Path(scratch), lambda step: bar.update(task, description=step))
        except SideError as error:
            fail(str(error), status=1)

        def next_run(name: str) -> None:
            bar.update(task, description=name, advance=1)

        for order, disk in pairs:
            cells.append(run_cell(setup, setup.trace(order), disk, chosen_sides, rounds, record, next_run))
            if json_file is not None:  # after each cell: an hour's figures need not be lost with its last run
                figures = live_figures(setup, cells, chosen_sides)
                json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    show(setup, cells, chosen_sides)
    raise SystemExit(1 if any(cell.failures for cell in cells) else 0)


def chosen(text: str | None, choices: Sequence[Name], option: str) -> tuple[Name, ...]:
    """Return the names in `text`, with commas between; all without it. Leaves with status 2 if one is not known."""
    names = [name.strip() for name in text.split(",")] if text else list(choices)
    for name in names:
        must_be_one_of(option, name, choices)
    return tuple(name for name in choices if name in names)
