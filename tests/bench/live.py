"""`coserve bench live`: every policy, and what else a user would pick, on real images and real weights files."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from tools.cli.console import fail
from tools.cli.option_values import must_be_architecture

_DEFAULT_SIDES = "all eight policies, samba-ordinary, naive and ray-serve"
Name = TypeVar("Name", bound=str)
Folder = Annotated[Path | None, typer.Option("--dir", help="Where the experts are made once (~25 GB); a cache folder.")]


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("live")(bench_live)


def bench_live(
    folder: Folder = None,
    sides: Annotated[str | None, typer.Option(help=f"With commas between; without it {_DEFAULT_SIDES}.")] = None,
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
    fits: Annotated[bool, typer.Option(help="Also compare where every expert fits the memory.")] = True,
    record: Annotated[Path | None, typer.Option("--trace", help="Record our policies' runs into this folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    chart_file: Annotated[Path | None, typer.Option("--chart", help="Draw bars into this PNG.")] = None,
) -> None:
    """Images per second of every policy, of ordinary loading, and of Ray Serve: one memory budget, one trace.

    Weights are random; each side runs in its own process and reads through the same reader. The first run makes the
    experts, and an environment for Ray Serve (with pip). Exit status 1 where a side failed.

    Example: coserve bench live --traces skewed --disks paced --sides samba,coserve,coserve-plus
    """
    from tests.bench.compare import Comparison, Settings, compare
    from tests.bench.job import DISKS, SIDES
    from tests.bench.stage import SideError, Size, default_folder
    from tests.bench.stock import Recipe
    from tests.bench.workload import ORDERS

    must_be_architecture("--classifier", classifier, "classify")
    must_be_architecture("--detector", detector, "detect")
    recipe = Recipe(experts, detectors, classifier, detector, input_size)
    settings = Settings(
        folder=folder or default_folder(),
        size=Size(recipe, requests, memory, executors, threads, limit_s),
        sides=chosen(sides, SIDES, "--sides"),
        traces=chosen(traces, ORDERS, "--traces"),
        disks=chosen(disks, DISKS, "--disks"),
        rounds=rounds,
        fits=fits,
        record=record,
    )

    def save(so_far: Comparison) -> None:
        if json_file is not None:
            so_far.write(json_file)

    with tempfile.TemporaryDirectory(prefix="coserve-bench-") as scratch:
        try:
            comparison = compare(settings, Path(scratch), save)
        except SideError as error:
            fail(str(error), status=1)
    save(comparison)
    if chart_file is not None:
        from tests.bench.chart import draw_live

        draw_live(comparison, chart_file)
    comparison.show()
    raise SystemExit(1 if comparison.failed else 0)


def chosen(text: str | None, known: Sequence[Name], option: str) -> tuple[Name, ...]:
    """The names in `text`, with commas between; all without it. Leaves with status 2 where one is not known."""
    names = [name.strip() for name in text.split(",")] if text else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        fail(f"{option} {unknown[0]}: not known; choose from {', '.join(known)}", status=2)
    return tuple(one for one in known if one in names)
