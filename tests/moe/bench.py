"""`coserve moe bench`: all modes of serving at equal memory, in one run."""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experts.moe.modes import MODES
from tests.moe.corpus import DEFAULT_CHECKPOINT
from tools.terminal.console import console, fail, print_table, quiet_start
from tools.terminal.option_values import JsonFile

if TYPE_CHECKING:
    from tests.moe.side import SideJob, SideReport

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


@dataclass(slots=True)
class BenchCell:
    """One mode at one budget over one link: medians over the rounds."""

    side: str
    share: float
    link_ms: float
    options: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None


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
    jobs = list(_jobs(checkpoint, only or list(MODES), link_ms, torch_device))
    cells = _measure(jobs, rounds)
    account: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(torch_device),
        "weights": _describe_weights(checkpoint),
        "rounds": rounds,
        "prompts": {"count": 5 * jobs[0].prompts, "tokens": jobs[0].prompt_tokens, "new_tokens": jobs[0].new_tokens},
        "cells": [asdict(cell) for cell in cells],
    }
    _print(account, cells)
    if charts is not None and (file := draw_times(cells, charts)):
        console.print(f"drawn: {file}")
    if as_json is not None:
        as_json.write_text(json.dumps(account, indent=1), encoding="utf-8")


def _describe_weights(checkpoint: Path) -> str:
    report = checkpoint / "training.json"
    if not report.is_file():
        return f"{checkpoint.name}, not trained here"
    trained = json.loads(report.read_text(encoding="utf-8"))
    return f"trained fixture, {trained['parameters'] / 1e6:.1f} M parameters, {trained['recipe']['steps']} steps"


def _jobs(checkpoint: Path, sides: Sequence[str], link_ms: float, device: str) -> "Iterator[SideJob]":
    """Yield every mode at every budget; `resident` has all experts."""
    from tests.moe.side import SideJob

    for side in sides:
        for share in (1.0,) if side == "resident" else _SHARES:
            yield SideJob(
                checkpoint=checkpoint,
                side=side,
                share=share,
                links_ms=(0.0, link_ms) if link_ms else (0.0,),
                device=device,
                prompts=1,
                prompt_tokens=128,
                new_tokens=32,
                judged=3,
                options=_options(side, share),
            )


def _options(side: str, share: float) -> dict[str, Any]:
    """Return options where a short run with the defaults would show nothing, as brownout's threshold 1."""
    if side == "brownout":
        return {"way": 4 if share >= 0.5 else 8, "threshold": 0.6}
    return {"period": 5} if side == "emoe" else {}


def _measure(jobs: "list[SideJob]", rounds: int) -> list[BenchCell]:
    """Run all jobs in rounds, each in a process; a job that failed once is not run again."""
    from rich.progress import track

    reports: dict[int, list[SideReport]] = {number: [] for number in range(len(jobs))}
    turns = [number for _ in range(rounds) for number in range(len(jobs))]
    for number in track(turns, description="modes", console=console):
        earlier = reports[number]
        if not any(report.error for report in earlier):
            # Perplexity is the same in every round, and half of the time.
            earlier.append(_run(replace(jobs[number], judged=0) if earlier else jobs[number]))
    return [cell for number, job in enumerate(jobs) for cell in _cells(job, reports[number])]


def _run(job: "SideJob") -> "SideReport":
    from tests.moe.side import JOB, REPORT, SideReport

    with tempfile.TemporaryDirectory(prefix="coserve-moe-bench-") as folder:
        job_file, report_file = Path(folder) / "job.json", Path(folder) / "report.json"
        job_file.write_bytes(JOB.dump_json(job))
        command = [sys.executable, "-m", "tests.moe.side", str(job_file), str(report_file)]
        process = subprocess.run(command, check=False, capture_output=True, text=True, env=quiet_start())
        if process.returncode or not report_file.is_file():
            last = process.stderr.strip().splitlines()[-1:] or [f"ended with {process.returncode}"]
            return SideReport(error=last[0])
        return REPORT.validate_json(report_file.read_bytes())


def _cells(job: "SideJob", reports: "list[SideReport]") -> Iterator[BenchCell]:
    error = next((report.error for report in reports if report.error), None)
    if error is not None:
        yield BenchCell(job.side, job.share, job.links_ms[0], job.options, error=error)
        return
    for runs in zip(*(report.runs for report in reports), strict=True):
        figures = {name: _median([run.figures.get(name) for run in runs]) for name in runs[0].figures}
        yield BenchCell(job.side, job.share, runs[0].link_ms, job.options, figures)


def _median(values: list[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return median(measured) if measured else None


def _machine(device: str) -> str:
    import torch

    place = torch.cuda.get_device_name(device) if device != "cpu" else f"{torch.get_num_threads()} threads, no GPU used"
    return f"{platform.machine()}, {os.cpu_count()} cores, {place}"


def _print(account: dict[str, Any], cells: list[BenchCell]) -> None:
    console.print(f"{account['weights']} · {account['machine']} · medians of {account['rounds']} runs")
    prompts = account["prompts"]
    console.print(
        f"{prompts['count']} prompts of {prompts['tokens']} tokens, {prompts['new_tokens']} new ones, batch 1; "
        "peak: memory beyond the libraries'; fetches that were waited for, fetches in time and MB: per token"
    )
    for cell in cells:
        if cell.options and not cell.link_ms:
            options = ", ".join(f"{name} {value}" for name, value in cell.options.items())
            console.print(f"{cell.side} at {cell.share:.0%}: {options}")
    for link_ms in dict.fromkeys(cell.link_ms for cell in cells):
        measured = [cell for cell in cells if cell.link_ms == link_ms and cell.error is None]
        title = f"with {link_ms:g} ms more for each expert" if link_ms else "as is"
        for columns in (_TIMES, _TRAFFIC):
            names = ("side", "experts", *(name for name, _, _ in columns))
            print_table(title, names, [(cell.side, f"{cell.share:.0%}", *_row(cell, columns)) for cell in measured])
    for cell in cells:
        if cell.error is not None:
            console.print(f"{cell.side} at {cell.share:.0%} was not measured: {cell.error}", markup=False)


def _row(cell: BenchCell, columns: Sequence[tuple[str, str, int]]) -> list[str | None]:
    values = [(cell.figures.get(name), digits) for _, name, digits in columns]
    return [None if value is None else f"{value:.{digits}f}" for value, digits in values]


def draw_times(cells: list[BenchCell], folder: Path) -> Path | None:
    """Draw milliseconds per token of every mode, p50 and p95, for each link and budget; None without figures."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    measured = [cell for cell in cells if cell.error is None]
    panels = list(dict.fromkeys((cell.link_ms, cell.share) for cell in measured if cell.side != "resident"))
    if not panels:
        return None
    height = -(-len(panels) // 2)
    figure, axes = plt.subplots(height, 2, figsize=(9.0, 3.6 * height), squeeze=False, layout="constrained")
    for panel in axes.flat[len(panels) :]:
        panel.set_axis_off()
    for panel, (link_ms, share) in zip(axes.flat, panels, strict=False):
        shown = [cell for cell in measured if cell.link_ms == link_ms and cell.share in {share, 1.0}][::-1]
        names = [cell.side for cell in shown]
        p50 = [cell.figures["tpot_p50_ms"] for cell in shown]
        panel.barh(names, [cell.figures["tpot_p95_ms"] for cell in shown], color="#d5d5d5")
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
