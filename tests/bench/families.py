"""`coserve bench families`: classifiers as heads of one backbone beside the same classifiers as whole networks."""

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tests.bench.rounds import ratios, run_in_turn, spread
from tools.terminal.console import AsJson, console, print_json, print_table

if TYPE_CHECKING:
    from experts.vision.slot import Slot
    from tests.bench.live.sides import SideInput

_SIZE, _CLASSIFIERS, _DETECTORS, _MANY = 64, 16, 2, 350
#: As the demo's line: a ResNet-18 and one of the YOLO nanos fit.
_MEMORY_BYTES = 64_000_000
_BATCH = 8
_NOTES = (
    "random weights: the same ResNet-18 as backbone of 16 heads and as 16 networks, two YOLO11n behind them, 64 pixels",
    "coserve-plus, two executors of one thread, 64 MB for experts as in the demo, all images wait at the start",
    "reads past the page cache, 530 MB/s at most",
)


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("families")(bench_families)


def bench_families(
    images: Annotated[int, typer.Option(min=32, help="Images of a run.")] = 400,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side runs.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure a line of 16 classifiers as heads and as whole networks, and batches of one type and of eight.

    Example: coserve bench families
    """
    import structlog
    import torch

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, _lines(Path(scratch)) as (sides, slot, heads):
        from tests.bench.live.engine import run_engine

        runs = run_in_turn({name: lambda side=side: run_engine(side(images)) for name, side in sides.items()}, rounds)
        mixed = _batch_ratios(slot, heads, rounds * 20)
        kept_bytes = slot.size_bytes + sum(spec.weights_bytes for spec in heads)
    rates = {name: [run.images / run.seconds for run in each] for name, each in runs.items()}
    gain = spread(ratios(rates["heads"], rates["networks"]))
    loads = {name: spread([float(run.loads) for run in each]) for name, each in runs.items()}
    failed = [run.failure for each in runs.values() for run in each if run.failure]
    if as_json:
        print_json(
            {"images_per_s": rates, "gain": gain, "loads": loads, "mixed_batch": mixed, "350_heads_bytes": kept_bytes}
            | {"failures": failed}
        )
        return
    rows = [(name, spread(rates[name]).text(1), loads[name].text(0)) for name in rates]
    print_table("Sixteen component types", ("classifiers as", "images/s", "loads"), rows)
    console.print(f"heads: {gain.text(2)} x the images/s of networks")
    console.print(f"a batch of {_BATCH} types takes {mixed.text(3)} x a batch of {_BATCH} images of one type")
    console.print(f"{_MANY} heads and their backbone: {kept_bytes / 1e6:.0f} MB")
    for note in (*_NOTES, *failed):
        console.print(note, markup=False)


@contextmanager
def _lines(scratch: Path) -> "Iterator[tuple[dict[str, Any], Slot, list[Any]]]":
    """Yield a function of the number of images for each side, a slot with the backbone, and 350 heads of it."""
    import torch

    from experts.catalog import CatalogEntry, CatalogFile, resolve, write_catalog
    from experts.vision import frameworks
    from experts.vision.slot import SlotPool
    from tests.bench.live.image_trace import LABELS
    from tools.training.backbone import write_backbone
    from tools.training.fit import new_network
    from tools.training.head import write_head
    from tools.training.importer import import_model

    torch.manual_seed(7)
    network = new_network("resnet18", 2).eval()
    frameworks.ultralytics()
    from ultralytics.nn.tasks import DetectionModel

    detector = DetectionModel("yolo11n.yaml", nc=2, verbose=False).eval()
    names = [f"type{number}" for number in range(_CLASSIFIERS)]
    whole, small = scratch / "networks", scratch / "heads"
    entries: dict[str, dict[str, dict[str, Any]]] = {"networks": {}, "heads": {}}
    backbone = write_backbone(network, "resnet18", _SIZE, small, "line")
    for folder, side in ((whole, "networks"), (small, "heads")):
        for number in range(_DETECTORS):
            report = import_model(detector, "yolo11n", LABELS, _SIZE, folder, expert=f"solder{number}")
            entries[side][f"solder{number}"] = report.entry
    many: dict[str, dict[str, Any]] = {}
    for number in range(_MANY):
        tensors = {"weight": torch.randn(2, 512) * 0.1, "bias": torch.zeros(2)}
        name = names[number] if number < _CLASSIFIERS else f"more{number}"
        entry = CatalogEntry.model_validate(backbone)
        many[name] = write_head("linear", tensors, entry, LABELS, small, expert=name, origin="random")
    for name in names:
        entries["networks"][name] = import_model(network, "resnet18", LABELS, _SIZE, whole, expert=name).entry
        entries["heads"][name] = many[name]
    write_catalog(whole / "catalog.yaml", entries["networks"])
    write_catalog(small / "catalog.yaml", entries["heads"])
    specs, problems = resolve(CatalogFile.model_validate({"experts": many}), small)
    assert not problems, problems
    heads = list(specs.values())
    pool = SlotPool("cpu", heads[0].resident.weights_bytes)
    pool.load(heads[0].resident)
    slot = pool.slot(heads[0].resident.expert)
    sides = {side: _side(scratch / side, scratch) for side in entries}
    yield sides, slot, heads


def _side(folder: Path, scratch: Path) -> Any:
    def of(images: int) -> "SideInput":
        import random

        from daemon.policy.matrix import Performance
        from experts.spec import resident_in
        from tests.bench.live.expert_files import make_pictures, read_experts
        from tests.bench.live.image_trace import ComponentType, ImageTrace, TraceImage
        from tests.bench.live.sides import SideInput

        rng = random.Random(5)
        types = tuple(
            ComponentType(f"type{number}", f"solder{number % _DETECTORS}", 1 / _CLASSIFIERS)
            for number in range(_CLASSIFIERS)
        )
        chosen = [types[rng.randrange(_CLASSIFIERS)] for _ in range(images)]
        trace = ImageTrace(
            "board",
            types,
            tuple(TraceImage(each.classifier, each.detector, 0, rng.random() < 0.8) for each in chosen),
        )
        costs = tuple(
            Performance("cpu", spec.layout, 0.008, 0.002, _BATCH, disk_s=spec.read_bytes / 5e8)  # type: ignore[arg-type]
            for spec in resident_in(read_experts(folder / "catalog.yaml")).values()
        )
        return SideInput(
            side="coserve-plus", trace=trace, catalog=folder / "catalog.yaml", pictures=make_pictures(1, 3),
            budgets=(_MEMORY_BYTES,), disk="paced", limit_s=600.0, disk_lock=scratch / "lock",
            costs=tuple({row.architecture: row for row in costs}.values()),
        )  # fmt: skip

    return of


def _batch_ratios(slot: "Slot", heads: list[Any], rounds: int) -> Any:
    """Return the time of a batch of eight types by that of a batch of one type, taken in turn."""
    import numpy as np

    from experts.vision.infer import infer_each
    from experts.vision.preprocess import fit

    rng = np.random.default_rng(0)
    images = [fit(rng.integers(0, 255, (_SIZE, _SIZE, 3), np.uint8), "classify", _SIZE) for _ in range(_BATCH)]

    def seconds(experts: list[Any]) -> float:
        begin_s = time.perf_counter()
        infer_each(slot, images, experts)
        return time.perf_counter() - begin_s

    seconds(heads[:_BATCH])
    times = {"mixed": list[float](), "same": list[float]()}
    for round_number in range(rounds):
        first = (round_number * _BATCH) % (len(heads) - _BATCH)
        seconds(heads[first : first + _BATCH])  # heads are read at their first use
        times["mixed"].append(seconds(heads[first : first + _BATCH]))
        times["same"].append(seconds([heads[first]] * _BATCH))
    return spread(ratios(times["mixed"], times["same"]))
