"""`coserve bench shadow`: a real line with and without a version in shadow, saturated and at 60 % load, in turn."""

import itertools
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any

import typer

from tests.bench.rounds import Runs, ratios, run_in_turn, spread
from tools.terminal.console import AsJson, console, print_json, print_table

_SIZE, _TYPES, _LOAD = 96, 3, 0.6
_RULES = """\
boards:
  free: {extras: allow, components: {A: 100000, B: 100000, C: 100000}}
classifiers:
  "*": {expert: "{component}", pass: [ok, bad], review_below: 0.0}
"""
_NOTES = (
    f"three ResNet-18 of random weights, {_SIZE} pixels, one executor of one thread; the shadow is another ResNet-18",
    "images/s from the first image sent to the last verdict; latency from acceptance to the durable verdict",
    f"{_LOAD:.0%} load: of the images/s of a saturated run without a shadow, before all others",
)


@dataclass(frozen=True, slots=True)
class ShadowRun:
    """One run: `shadowed` of the images of the expert have an answer in shadow at its end."""

    images_per_s: float
    p50_ms: float
    p99_ms: float
    shadowed: float


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("shadow")(bench_shadow)


def bench_shadow(
    images: Annotated[int, typer.Option(min=50, help="Images of a run.")] = 1500,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side runs.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure what a version in shadow costs the line: images/s and latency beside the same line without one.

    Example: coserve bench shadow
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _make_experts(folder / "first", seed=1)
        _make_experts(folder / "second", seed=2)
        numbers = itertools.count()

        def run(rate: float | None, *, in_shadow: bool) -> ShadowRun:
            return _run(folder, f"line{next(numbers)}", images, rate, in_shadow=in_shadow)

        rate = _LOAD * run(None, in_shadow=False).images_per_s
        sides = {
            f"{load}, {name}": lambda rate=asked, in_shadow=in_shadow: run(rate, in_shadow=in_shadow)
            for load, asked in (("saturated", None), (f"{_LOAD:.0%}", rate))
            for name, in_shadow in (("without", False), ("with", True))
        }
        runs = run_in_turn(sides, rounds)
    rows = [(name, *(spread(_figures(runs, name, each)).text(1) for each in _FIGURES)) for name in runs]
    gains = {
        f"{load} {figure}": spread(
            ratios(_figures(runs, f"{load}, with", figure), _figures(runs, f"{load}, without", figure))
        )
        for load in ("saturated", f"{_LOAD:.0%}")
        for figure in _FIGURES
    }
    if as_json:
        print_json({"runs": {name: list(map(asdict, each)) for name, each in runs.items()}, "ratios": gains})
        return
    print_table(f"{images} images, {rounds} rounds", ("load, shadow", "images/s", "p50 ms", "p99 ms"), rows)
    for name, gain in gains.items():
        console.print(f"{name}: with is {gain.text(3)} x without")
    for load in ("saturated", f"{_LOAD:.0%}"):
        shares = spread(_figures(runs, f"{load}, with", "shadowed"))
        console.print(f"{load}: share of the images that were shadowed {shares.text(2)}")
    for note in _NOTES:
        console.print(note, markup=False)


_FIGURES = ("images_per_s", "p50_ms", "p99_ms")


def _figures(runs: Runs[ShadowRun], name: str, figure: str) -> list[float]:
    return [getattr(each, figure) for each in runs[name]]


def _make_experts(folder: Path, seed: int) -> None:
    import numpy as np
    import torch

    from experts.catalog import write_catalog
    from experts.vision import frameworks
    from tools.training.importer import import_model

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    black = [np.zeros((_SIZE, _SIZE, 3), np.uint8)]
    entries: dict[str, Any] = {}
    for name in "ABC"[:_TYPES]:
        network = frameworks.torchvision().models.resnet18(num_classes=2)
        report = import_model(network, "resnet18", ("ok", "bad"), _SIZE, folder, expert=name, images=black)
        entries[name] = report.entry
    write_catalog(folder / "catalog.yaml", entries)


def _run(folder: Path, name: str, images: int, rate: float | None, *, in_shadow: bool) -> ShadowRun:
    """Run a new line; with `rate`, images are sent at so many a second."""
    from coserve_client import Publisher
    from tests.contract.client import Line
    from tests.contract.shadow_process import idled, urged
    from tests.lines import COSERVE_RUN, a_jpeg
    from tools.experts.change import mark_shadow, put
    from tools.experts.line import open_line

    line = Line(folder / name, folder / "first", _RULES, COSERVE_RUN, memory="200MB")
    pictures = [a_jpeg(seed, 128, 96) for seed in range(16)]
    board = {"type": "free", "serial": "S1"}
    if in_shadow:
        experts = open_line(line.config)
        version, _ = put(experts, "A", folder / "second")
        mark_shadow(experts, "A", version, images=1000, agreement=0.98)
    with line.service():
        for component in "ABC"[:_TYPES]:  # everything is loaded, and the shadow has begun
            line.send(component=component)
        line.idle()
        if in_shadow:  # it begins as fast as it can, and then has its own priority again
            process = urged(line)
            line.send(component="A")
            line.wait(lambda: line.status()["shadows"][0]["answers"] >= 1, 600.0)
            line.idle()
            idled(process)
        (first,) = line.rows("SELECT max(inspection_id) FROM inspections")[0]
        begin_s = time.monotonic()
        with Publisher(line.intake, source="bench") as publisher:
            for number in range(images):
                if rate is not None:
                    time.sleep(max(0.0, begin_s + number / rate - time.monotonic()))
                publisher.send(f"{number}", pictures[number % 16], board=board, component="ABC"[number % _TYPES])
            publisher.finish()
        line.wait(lambda: line.rows("SELECT count(*) FROM inspections WHERE verdict IS NULL") == [(0,)], 600.0)
        seconds = time.monotonic() - begin_s
    latencies = [ms for (ms,) in line.rows("SELECT latency_ms FROM inspections WHERE inspection_id > ?", first)]
    (answers,) = line.rows("SELECT count(*) FROM shadow_answers WHERE inspection_id > ?", first)[0]
    cuts = quantiles(latencies, n=100)
    return ShadowRun(images / seconds, cuts[49], cuts[98], answers / (images / _TYPES))
