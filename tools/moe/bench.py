"""`coserve moe bench`: all modes and baselines of serving at equal memory, and their peer, in one run."""

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
from typing import Annotated, Any

import typer

from tools.cli.console import console, fail, print_table, quiet_start
from tools.moe.fixture import DEFAULT_FIXTURE
from tools.moe.job import ACCELERATE, JOB, REPORT, Job, Report

_SHARES = (0.5, 0.25)
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
    ("all", "all_predicted", 2),
    ("any", "any_predicted", 2),
    ("perplexity", "perplexity", 2),
)


@dataclass(slots=True)
class Cell:
    """One side at one budget over one link: medians over the rounds."""

    side: str
    share: float
    link_ms: float
    options: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command()(bench)


def bench(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="PreparedFiles.")] = DEFAULT_FIXTURE,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of every side, interleaved; medians are shown.")] = 3,
    link_ms: Annotated[float, typer.Option(min=0, help="Also with a link this slow for each expert.")] = 2.0,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, or auto for a GPU where one is.")] = "auto",
    only: Annotated[list[str] | None, typer.Option("--side", help="Of the sides, this one. Repeat.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the whole account here.")] = None,
    charts: Annotated[Path | None, typer.Option(help="Draw curves into this folder: minutes more.")] = None,
) -> None:
    """Measure every mode of serving beside the baselines and `accelerate`, with half and a quarter of the experts.

    Prepare with `coserve moe fixture`, `trace`, `fit`, `unite` and `plan`. A side that lacks something is named.
    """
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
        fail(f"--device: expected cpu, cuda:0, cuda:1, … or auto, not {device!r}", status=2)
    import torch

    from experts.moe.modes import MODES
    from experts.moe.weights.prepared import PreparedFiles
    from tools.moe.evaluate import require_decoder
    from tools.moe.text import HELD_OUT

    chosen = "cuda:0" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    sides = [*MODES, ACCELERATE]
    if unknown := [side for side in only or () if side not in sides]:
        fail(f"--side {unknown[0]}: sides are {', '.join(sides)}", status=2)
    require_decoder(checkpoint)
    PreparedFiles(checkpoint).load(HELD_OUT)  # says which command makes it
    jobs = list(_jobs(checkpoint, only or sides, link_ms, chosen))
    cells = _measure(jobs, rounds)
    account: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(chosen),
        "weights": weights_of(checkpoint),
        "rounds": rounds,
        "prompts": {"count": 5 * jobs[0].prompts, "tokens": jobs[0].prompt_tokens, "new_tokens": jobs[0].new_tokens},
        "cells": [asdict(cell) for cell in cells],
    }
    _print(account, cells)
    if charts is not None:
        from tools.moe.charts import draw
        from tools.moe.curves import measure_curves

        account["curves"] = measure_curves(checkpoint)
        for file in draw(account, charts):
            console.print(f"drawn: {file}")
    if as_json is not None:
        as_json.write_text(json.dumps(account, indent=1), encoding="utf-8")


def weights_of(checkpoint: Path) -> str:
    """What kind of weights these are, for the report."""
    report = checkpoint / "training.json"
    if not report.is_file():
        return f"{checkpoint.name}, not trained here"
    trained = json.loads(report.read_text(encoding="utf-8"))
    return f"trained fixture, {trained['parameters'] / 1e6:.1f} M parameters, {trained['recipe']['steps']} steps"


def _jobs(checkpoint: Path, sides: Sequence[str], link_ms: float, device: str) -> Iterator[Job]:
    """Every side at every budget; `resident` has all experts, the peer no link that could be slowed."""
    for side in sides:
        for share in (1.0,) if side == "resident" else _SHARES:
            yield Job(
                checkpoint=checkpoint,
                side=side,
                share=share,
                links_ms=(0.0, link_ms) if link_ms else (0.0,),
                device="cpu" if side == ACCELERATE else device,
                prompts=1,
                prompt_tokens=128,
                new_tokens=32,
                judged=3,
                options=_options(side, share),
            )


def _options(side: str, share: float) -> dict[str, Any]:
    """Brownout where it has something to do, its united experts in half of the memory; eMoE's choice every 5 prompts.

    At its default, threshold 1, `brownout` answers what `resident` does.
    """
    if side == "brownout":
        return {"way": 4 if share >= 0.5 else 8, "threshold": 0.6}
    return {"period": 5} if side == "emoe" else {}


def _measure(jobs: list[Job], rounds: int) -> list[Cell]:
    """Rounds over all jobs, each in a process; a job that failed once is not run again."""
    from rich.progress import track

    reports: dict[int, list[Report]] = {number: [] for number in range(len(jobs))}
    turns = [number for _ in range(rounds) for number in range(len(jobs))]
    for number in track(turns, description="sides", console=console):
        done = reports[number]
        if not any(report.error for report in done):
            # Perplexity is the same in every round, and half of the time.
            done.append(_run(replace(jobs[number], judged=0) if done else jobs[number]))
    return [cell for number, job in enumerate(jobs) for cell in _cells(job, reports[number])]


def _run(job: Job) -> Report:
    with tempfile.TemporaryDirectory(prefix="coserve-moe-bench-") as folder:
        asked, told = Path(folder) / "job.json", Path(folder) / "report.json"
        asked.write_bytes(JOB.dump_json(job))
        command = [sys.executable, "-m", "tools.moe.side", str(asked), str(told)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=quiet_start())  # noqa: S603
        if done.returncode or not told.is_file():
            last = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
            return Report(error=last[0])
        return REPORT.validate_json(told.read_bytes())


def _cells(job: Job, reports: list[Report]) -> Iterator[Cell]:
    error = next((report.error for report in reports if report.error), None)
    if error is not None:
        yield Cell(job.side, job.share, job.links_ms[0], job.options, error=error)
        return
    for runs in zip(*(report.runs for report in reports), strict=True):
        figures = {name: _middle([run.figures.get(name) for run in runs]) for name in runs[0].figures}
        yield Cell(job.side, job.share, runs[0].link_ms, job.options, figures)


def _middle(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _machine(device: str) -> str:
    import torch

    place = torch.cuda.get_device_name(device) if device != "cpu" else f"{torch.get_num_threads()} threads, no GPU used"
    return f"{platform.machine()}, {os.cpu_count()} cores, {place}"


def _print(account: dict[str, Any], cells: list[Cell]) -> None:
    console.print(f"{account['weights']} · {account['machine']} · medians of {account['rounds']} runs")
    prompts = account["prompts"]
    console.print(
        f"{prompts['count']} prompts of {prompts['tokens']} tokens, {prompts['new_tokens']} new ones, batch 1; "
        "peak: memory beyond what the libraries had; fetches that were waited for, fetches in time and MB: a token"
    )
    for cell in cells:
        if cell.options and not cell.link_ms:
            given = ", ".join(f"{name} {value}" for name, value in cell.options.items())
            console.print(f"{cell.side} at {cell.share:.0%}: {given}")
    for link_ms in dict.fromkeys(cell.link_ms for cell in cells):
        there = [cell for cell in cells if cell.link_ms == link_ms and cell.error is None]
        title = f"with {link_ms:g} ms more for each expert" if link_ms else "as is"
        for columns in (_TIMES, _TRAFFIC):
            names = ("side", "experts", *(name for name, _, _ in columns))
            print_table(title, names, [(cell.side, f"{cell.share:.0%}", *_row(cell, columns)) for cell in there])
    for cell in cells:
        if cell.error is not None:
            console.print(f"{cell.side} at {cell.share:.0%} was not measured: {cell.error}", markup=False)


def _row(cell: Cell, columns: Sequence[tuple[str, str, int]]) -> list[str | None]:
    return [_shown(cell.figures.get(name), digits) for _, name, digits in columns]


def _shown(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
