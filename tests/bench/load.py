"""`coserve bench load`: how fast an expert becomes resident, beside the raw channel and the ordinary ways."""

import os
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tests.bench.options import DeviceNames, chosen_devices
from tests.bench.tables import print_rows
from tools.terminal.console import AsJson, console, fail, print_json
from tools.terminal.option_values import must_be_one_of

if TYPE_CHECKING:
    from experts.vision.slot import LayoutShelf
    from tests.bench.loading import LoadFigures

_NOTES = (
    "random weights; medians; shares and ratios within a round",
    "a file's sha256 is checked at its first load only: later loads, checked by a keyed hash, are measured",
    "ordinary ways end with load_state_dict; slot is faster: how many times faster the slot is, cold or warm alike",
    "slots from thin files stand beside a read of that file alone, and beside the slot from the plain file",
)
_COLD_READS = {
    "dropped": "cold reads are made after the file's pages were dropped from the page cache",
    "cached": "NO COLD READS: this filesystem lives in memory; name a folder on a disk with --folder",
}


def bench_load(
    architecture: Annotated[
        list[str] | None, typer.Option(help="A ResNet; may be given again. Without it resnet18 and resnet101.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="How weights are stored.")
    ] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is measured.")] = 7,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="FOLDER", help="On the disk to measure; temporary files go there."),
    ] = None,
    device: DeviceNames = None,
    as_json: AsJson = False,
) -> None:
    """Measure loads of experts into each device: from the cold disk, the page cache and the RAM tier.

    Each slot load stands beside the raw rate of its channel and beside torch.load and safetensors with an ordinary
    module, all of the same run. Exit status 1 if it could not be measured.

    Example: coserve bench load --dtype bfloat16
    """
    names = architecture or ["resnet18", "resnet101"]
    from experts.errors import ExpertError
    from experts.vision.architectures import ARCHITECTURES

    resnets = [name for name, entry in ARCHITECTURES.items() if entry.task == "classify"]
    for name in names:
        must_be_one_of("--architecture", name, resnets)
    if folder is not None and not folder.is_dir():
        fail(f"no folder {folder}", status=2)
    devices = chosen_devices(device)
    try:
        result = measure_loads(names, dtype, rounds, folder, devices)
    except (OSError, RuntimeError, ImportError, MemoryError, ExpertError) as error:
        fail(f"could not measure: {error}", status=1)
    if as_json:
        print_json({**result, "figures": [asdict(figures) for figures in result["figures"]]})
    else:
        print_result(result)


def measure_loads(
    names: list[str],
    dtype: str,
    rounds: int,
    folder: Path | None,
    devices: tuple[str, ...],
    shelf: "LayoutShelf | None" = None,
) -> dict[str, Any]:
    """Return the figures of every architecture on every device. Raises ExpertError, OSError, RuntimeError."""
    import torch

    from tests.bench.loading import LoadBench, make_expert

    methods: list[str] = []
    figures: list[LoadFigures] = []
    with tempfile.TemporaryDirectory(prefix="coserve-bench-", dir=folder) as scratch:
        for name in names:
            expert = make_expert(Path(scratch), name, dtype)
            for device in devices:
                bench = LoadBench(expert, device, shelf)
                figures += bench.measure(rounds)
                methods.append(bench.cold.method)
    return {
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "devices": list(devices),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "rounds": rounds,
        "cold_reads": max(methods, key=list(_COLD_READS).index),
        "notes": list(_NOTES),
        "figures": figures,
    }


def print_result(result: dict[str, Any]) -> None:
    """Print a table for each architecture, and how it was measured."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for entry in map(asdict, result["figures"]):
        kind = ", ".join(entry.pop(name) for name in ("architecture", "dtype", "device"))
        kinds.setdefault(kind, []).append(entry)
    for kind, rows in kinds.items():
        print_rows(f"{kind}, {result['rounds']} rounds", rows)
    machine = f"{result['cores']} cores, torch {result['torch']} with {result['torch_threads']} threads"
    for note in (_COLD_READS[result["cold_reads"]], *_NOTES, machine):
        console.print(note, markup=False)
