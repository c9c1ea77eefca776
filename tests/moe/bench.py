"""`coserve moe fixture` and `coserve moe bench`: a small trained model, and all modes of serving it at equal memory."""

import json
import os
import platform
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from experts.moe.modes import MODES
from tests.bench.options import JsonFile
from tests.moe.corpus import DEFAULT_CHECKPOINT
from tools.terminal.console import console, fail, print_table

#: One mode at one budget over one link, with medians over the rounds.
Cell = dict[str, Any]

_SHARES = (0.5, 0.25)
#: Columns of the two tables: title, figure, digits.
_TIMES = (
    ("TTFT ms", "ttft_p50_ms", 1),
    ("p95", "ttft_p95_ms", 1),
    ("TPOT ms", "tpot_p50_ms", 1),
    ("p95", "tpot_p95_ms", 1),
    ("tokens/s", "tokens_per_s", 1),
    ("peak MB", "peak_mb", 1),
)
_TRAFFIC = (
    ("waited", "blocking_per_token", 2),
    ("in time", "overlapped_per_token", 2),
    ("MB", "moved_mb_per_token", 2),
    ("hits", "hit_rate", 2),
    ("perplexity", "perplexity", 2),
)


def fixture(
    out: Annotated[Path, typer.Option(help="The folder to write the checkpoint to.")] = DEFAULT_CHECKPOINT,
) -> None:
    """Train a Mixtral of 5.3 M parameters on text found on this machine: five minutes on two cores, once.

    An existing fixture is not made again.
    """
    from tests.moe.fixture import FixtureRecipe, make_fixture

    if make_fixture(out, FixtureRecipe()):
        console.print(f"trained: {out}")
    else:
        console.print(f"{out} is there already; delete it to train again")


def bench(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Prepared.")] = DEFAULT_CHECKPOINT,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of every mode, interleaved; medians are shown.")] = 3,
    link_ms: Annotated[float, typer.Option(min=0, help="Also with a link this slow for each expert.")] = 2.0,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, or auto for a GPU if there is one.")] = "auto",
    only: Annotated[list[str] | None, typer.Option("--side", help="Only this mode. Repeat.")] = None,
    as_json: JsonFile = None,
    charts: Annotated[Path | None, typer.Option(help="Draw the times per token into this folder.")] = None,
) -> None:
    """Measure every mode of serving with half and a quarter of the experts.

    Prepare with `coserve moe fixture`, `trace`, `fit`, `unite` and `plan`. The output names modes that lack something.
    """
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
        fail(f"--device: expected cpu, cuda:0, cuda:1, … or auto, not {device!r}", status=2)
    if unknown := [side for side in only or () if side not in MODES]:
        fail(f"--side {unknown[0]}: sides are {', '.join(MODES)}", status=2)
    import torch

    from experts.moe.weights.prepared import PreparedFiles
    from tests.moe.evaluate import make_texts

    torch_device = "cuda:0" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    make_texts(PreparedFiles(checkpoint))
    sides = [(side, share) for side in only or MODES for share in ((1.0,) if side == "resident" else _SHARES)]
    links_ms = (0.0, link_ms) if link_ms else (0.0,)
    cells = [cell for cells in _measure(checkpoint, sides, links_ms, torch_device, rounds) for cell in cells]
    account = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(torch_device),
        "weights": str(checkpoint),
        "rounds": rounds,
        "cells": cells,
    }
    _print(account, cells)
    if charts is not None and (file := draw_times(cells, charts)):
        console.print(f"drawn: {file}")
    if as_json is not None:
        as_json.write_text(json.dumps(account, indent=1), encoding="utf-8")


def _options(side: str, share: float) -> dict[str, Any]:
    """Return options where a short run with the defaults would show nothing, as brownout's threshold 1."""
    if side == "brownout":
        return {"way": 4 if share >= 0.5 else 8, "threshold": 0.6}
    return {"period": 5} if side == "emoe" else {}


def _measure(
    checkpoint: Path, sides: Sequence[tuple[str, float]], links_ms: tuple[float, ...], device: str, rounds: int
) -> Iterator[list[Cell]]:
    """Measure all sides in rounds, each in a process; one that failed once is not run again. Yield cells by link."""
    from rich.progress import track

    from tests.moe.side import SideJob, measure

    runs: list[list[Any]] = [[] for _ in sides]
    turns = [number for _ in range(rounds) for number in range(len(sides))]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for number in track(turns, description="modes", console=console):
            earlier, (side, share) = runs[number], sides[number]
            if earlier and isinstance(earlier[-1], str):
                continue
            # Perplexity is the same in every round, and half of the time.
            judged = 0 if earlier else 3
            job = SideJob(checkpoint, side, share, links_ms, device, judged, options=_options(side, share))
            earlier.append(processes.submit(measure, job).result())
    for (side, share), measured in zip(sides, runs, strict=True):
        cell = {"side": side, "share": share, "options": _options(side, share), "error": None}
        if isinstance(measured[-1], str):
            yield [cell | {"link_ms": 0.0, "figures": {}, "error": measured[-1]}]
            continue
        by_link = zip(links_ms, zip(*measured, strict=True), strict=True)
        yield [
            cell | {"link_ms": link_ms, "figures": {name: _median(rows, name) for name in rows[0]}}
            for link_ms, rows in by_link
        ]


def _median(rows: Sequence[dict[str, float | None]], name: str) -> float | None:
    measured = [value for row in rows if (value := row.get(name)) is not None]
    return median(measured) if measured else None


def _machine(device: str) -> str:
    import torch

    place = torch.cuda.get_device_name(device) if device != "cpu" else f"{torch.get_num_threads()} threads, no GPU used"
    return f"{platform.machine()}, {os.cpu_count()} cores, {place}"


def _print(account: dict[str, Any], cells: list[Cell]) -> None:
    console.print(f"{account['weights']} · {account['machine']} · medians of {account['rounds']} runs")
    console.print(
        "5 prompts of 128 tokens, 32 new ones, batch 1; peak: memory beyond the libraries'; fetches that were waited "
        "for, fetches in time and MB: per token"
    )
    for cell in cells:
        if cell["error"]:
            console.print(f"{cell['side']} at {cell['share']:.0%} was not measured: {cell['error']}", markup=False)
        elif cell["options"] and not cell["link_ms"]:
            options = ", ".join(f"{name} {value}" for name, value in cell["options"].items())
            console.print(f"{cell['side']} at {cell['share']:.0%}: {options}")
    for link_ms in dict.fromkeys(cell["link_ms"] for cell in cells):
        measured = [cell for cell in cells if cell["link_ms"] == link_ms and not cell["error"]]
        title = f"with {link_ms:g} ms more for each expert" if link_ms else "as is"
        for columns in (_TIMES, _TRAFFIC):
            names = ("side", "experts", *(name for name, _, _ in columns))
            print_table(
                title, names, [(cell["side"], f"{cell['share']:.0%}", *_row(cell, columns)) for cell in measured]
            )


def _row(cell: Cell, columns: Sequence[tuple[str, str, int]]) -> list[str | None]:
    values = [(cell["figures"].get(name), digits) for _, name, digits in columns]
    return [None if value is None else f"{value:.{digits}f}" for value, digits in values]


def draw_times(cells: list[Cell], folder: Path) -> Path | None:
    """Draw milliseconds per token of every mode, p50 and p95, for each link and budget; None without figures."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    measured = [cell for cell in cells if not cell["error"]]
    panels = list(dict.fromkeys((cell["link_ms"], cell["share"]) for cell in measured if cell["share"] < 1.0))
    if not panels:
        return None
    height = -(-len(panels) // 2)
    figure, axes = plt.subplots(height, 2, figsize=(9.0, 3.6 * height), squeeze=False, layout="constrained")
    for panel in axes.flat[len(panels) :]:
        panel.set_axis_off()
    for panel, (link_ms, share) in zip(axes.flat, panels, strict=False):
        shown = [cell for cell in measured if cell["link_ms"] == link_ms and cell["share"] in {share, 1.0}][::-1]
        names = [cell["side"] for cell in shown]
        p50 = [cell["figures"]["tpot_p50_ms"] for cell in shown]
        panel.barh(names, [cell["figures"]["tpot_p95_ms"] for cell in shown], color="#d5d5d5")
        bars = panel.barh(names, p50, color="#2f6f9f")
        panel.bar_label(bars, labels=[f"{value:.1f}" for value in p50], padding=3, fontsize=8)
        panel.set_title(f"{share:.0%} of the experts, {f'{link_ms:g} ms link' if link_ms else 'as is'}", fontsize=10)
        panel.set_xlabel("ms a token (grey: p95)")
        panel.spines[["top", "right"]].set_visible(False)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "moe-sides.png"
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file
