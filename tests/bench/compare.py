"""The comparison of `coserve bench live`: interleaved runs of all sides, and what they come to."""

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from daemon.units import size_text
from tests.bench.bound import Bound, live_bound
from tests.bench.job import DISKS, NAIVE, ORDINARY, OTHER_SIDES, PACED_BYTES_PER_S, RAY, Disk, Job, Run
from tests.bench.stage import SideError, Size, Stage, set_stage
from tests.bench.workload import Order
from tools.bench.tables import print_narrow
from tools.cli.console import console, errors
from tools.cli.progress import Bars
from tools.simulate.report import quantile

#: Sides slower than this share of the fastest run once.
_SLOW = 0.1
#: Every side is compared with these.
_BASES = {"coserve": "coserve", ORDINARY: "ordin.", NAIVE: "naive", RAY: "Ray"}
#: Where everything fits: so many times fewer experts, and these sides.
_FEWER = 10
_FITTING_SIDES = ("samba", "coserve-plus")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says."""

    folder: Path
    size: Size
    sides: tuple[str, ...]
    traces: tuple[Order, ...]
    disks: tuple[Disk, ...]
    rounds: int
    fits: bool = True
    record: Path | None = None


@dataclass(slots=True)
class Cell:
    """One trace on one disk: the runs of each side, the bound, and who failed."""

    trace: str
    disk: Disk
    bound: Bound
    runs: dict[str, list[Run]] = field(default_factory=dict[str, list[Run]])
    failures: dict[str, str] = field(default_factory=dict[str, str])

    def images_per_s(self, side: str) -> float | None:
        runs = self.runs.get(side)
        return median(run.images_per_s for run in runs) if runs else None

    def fastest(self) -> float:
        return max((median(run.images_per_s for run in runs) for runs in self.runs.values() if runs), default=0.0)

    def ratios(self, side: str) -> dict[str, float | None]:
        mine = self.images_per_s(side)
        bases = {base: self.images_per_s(base) for base in _BASES}
        return {base: mine / rate if mine is not None and rate else None for base, rate in bases.items()}

    def row(self, side: str) -> dict[str, Any]:
        """All that is known of one side, for JSON and for tables."""
        runs = self.runs.get(side, [])
        rate = self.images_per_s(side)
        return {
            "side": side,
            "images_per_s": rate,
            "images": _median([run.images for run in runs]),
            "stopped": any(run.stopped for run in runs),
            "loads": _median([run.loads for run in runs if run.loads is not None]),
            "p50_wait_s": _median([quantile(run.waits_s, 0.5) for run in runs if run.waits_s]),
            "p95_wait_s": _median([quantile(run.waits_s, 0.95) for run in runs if run.waits_s]),
            "share_of_bound": None if rate is None else rate / self.bound.images_per_s,
            "ratio_to": self.ratios(side),
            "runs": [_run_figures(run) for run in runs],
            "failure": self.failures.get(side),
        }


@dataclass(slots=True)
class Comparison:
    """Everything that was measured."""

    settings: Settings
    stage: Stage
    cells: list[Cell] = field(default_factory=list[Cell])
    fitting: Cell | None = None

    @property
    def failed(self) -> bool:
        cells = [*self.cells, *([self.fitting] if self.fitting else [])]
        return any(cell.failures for cell in cells)

    def figures(self) -> dict[str, Any]:
        size, machine = self.settings.size, self.stage.machine
        return {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
            "experts": asdict(size.recipe)
            | {"values": "random", "bytes": sum(spec.weights_bytes for spec in self.stage.specs.values())},
            "requests": size.requests,
            "memory_bytes": self.stage.memory_bytes,
            "executors": size.executors,
            "threads": size.threads,
            "limit_s": size.limit_s,
            "disks": {disk: machine.bytes_per_s(disk) for disk in DISKS},
            "measured": asdict(machine),
            "cells": [_cell_figures(cell, self.settings.sides) for cell in self.cells],
            "everything_fits": _cell_figures(self.fitting, _FITTING_SIDES) if self.fitting else None,
        }

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(self.figures(), indent=2) + "\n", encoding="utf-8")

    def show(self) -> None:
        """Tables for a person."""
        self._show_conditions()
        for cell in self.cells:
            title = (
                f"{cell.trace} trace, {cell.disk} disk: bound {cell.bound.images_per_s:.1f} images/s"
                f" (compute {cell.bound.compute_s:.1f} s, loads {cell.bound.load_s:.1f} s)"
            )
            columns = (
                "side",
                "images/s",
                "loads",
                "p50 s",
                "p95 s",
                "bound",
                *(f"/{name}" for name in _BASES.values()),
            )
            print_narrow(title, columns, self._rows(cell))
        for cell in self.cells:
            for side, why in cell.failures.items():
                errors.print(f"{side}, {cell.trace}, {cell.disk}: {why}", markup=False)
        if any(run.stopped for cell in self.cells for runs in cell.runs.values() for run in runs):
            console.print(
                "* stopped at the limit: the rate is over what was finished, waits are of the images that were (the"
                " others wait longer)"
            )
        console.print(
            "p50, p95: wait from arrival to the start of the first expert's batch; bound: share of it; /coserve,"
            " /ordin., /naive, /Ray: times coserve, samba with ordinary loading, naive, Ray Serve"
        )
        if self.fitting is not None:
            self._show_fitting(self.fitting)

    def _show_conditions(self) -> None:
        size, machine = self.settings.size, self.stage.machine
        recipe = size.recipe
        total_bytes = sum(spec.weights_bytes for spec in self.stage.specs.values())
        console.print(
            f"{recipe.classifiers} {recipe.classifier} and {recipe.detectors} {recipe.detector}, random weights,"
            f" {recipe.dtype}, {size_text(total_bytes)}; memory for {size_text(self.stage.memory_bytes)} of them;"
            f" {size.requests} images, all waiting; {size.executors} executors, {size.threads} threads on"
            f" {os.cpu_count()} cores"
        )
        console.print(
            f"cold disk: {size_text(machine.cold_bytes_per_s)}/s past the page cache ({machine.read_method});"
            f" paced disk: the same through a reader that sleeps, {size_text(PACED_BYTES_PER_S)}/s"
        )
        for row in machine.rows:
            console.print(
                f"{row.architecture}: {row.k_s * 1e3:.1f} ms per image + {row.b_s * 1e3:.1f} ms per batch,"
                f" best from batches of {row.max_batch}, each executor while all compute"
            )

    def _rows(self, cell: Cell) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for side in self.settings.sides:
            row = cell.row(side)
            ratios = [None if value is None else f"{value:.2f}" for value in row["ratio_to"].values()]
            rate = None if row["images_per_s"] is None else f"{row['images_per_s']:.2f}{'*' if row['stopped'] else ''}"
            share = None if row["share_of_bound"] is None else f"{row['share_of_bound']:.2f}"
            waits = [_rounded(row[key], 1) for key in ("p50_wait_s", "p95_wait_s")]
            rows.append((side, rate, row["loads"], *waits, share, *ratios))
        return rows

    def _show_fitting(self, cell: Cell) -> None:
        rates = [cell.images_per_s(side) for side in _FITTING_SIDES]
        if rates[0] and rates[1]:
            console.print(
                f"where every expert fits: coserve-plus {rates[1]:.2f} images/s, samba {rates[0]:.2f}:"
                f" {rates[1] / rates[0]:.2f} of it"
            )


def compare(
    settings: Settings, scratch: Path, after_cell: Callable[[Comparison], None] = lambda _so_far: None
) -> Comparison:
    """Set the stage and make all runs: round after round, every side in turn. Raises SideError before the first run.

    `after_cell` sees what is there after each trace and disk: an hour's figures need not be lost with its last run.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=errors) as bar:
        cells = len(settings.traces) * len(settings.disks)
        total = (cells * len(settings.sides) + settings.fits * len(_FITTING_SIDES)) * settings.rounds
        task = bar.add_task("preparing", total=total)

        def say(text: str) -> None:
            bar.update(task, description=text)

        stage = set_stage(settings.folder, scratch, settings.size, settings.sides, say)
        comparison = Comparison(settings, stage)
        runner = _Runner(settings, stage, bar, task)
        for order in settings.traces:
            for disk in settings.disks:
                trace = stage.trace(order)
                jobs = {side: stage.job(side, trace, disk) for side in settings.sides}
                comparison.cells.append(runner.run(order, disk, jobs))
                after_cell(comparison)
        if settings.fits:
            comparison.fitting = runner.run("everything fits", settings.disks[0], _fitting_jobs(settings, stage))
    return comparison


def _fitting_jobs(settings: Settings, stage: Stage) -> dict[str, Job]:
    """Fewer experts, on the skewed trace, with memory for all of them, and all loaded before the start."""
    few = max(2, settings.size.recipe.classifiers // _FEWER)
    trace = stage.trace("skewed", classifiers=few)
    needed_bytes = sum(stage.specs[expert].weights_bytes for expert in stage.specs if expert in trace.visits())
    disk = settings.disks[0]
    jobs = {side: stage.job(side, trace, disk, memory_bytes=needed_bytes) for side in _FITTING_SIDES}
    return {side: replace(job, warm=True) for side, job in jobs.items()}


class _Runner:
    """Interleaved runs of one cell after the other."""

    def __init__(self, settings: Settings, stage: Stage, bar: Progress, task: Any) -> None:
        self._settings, self._stage = settings, stage
        self._bar, self._task = bar, task

    def run(self, name: str, disk: Disk, jobs: dict[str, Job]) -> Cell:
        first = next(iter(jobs.values()))
        bound = live_bound(
            first.trace,
            self._stage.specs,
            self._stage.machine.rows,
            memory_bytes=first.memory_bytes,
            bytes_per_s=self._stage.machine.bytes_per_s(disk),
            executors=first.executors,
        )
        cell = Cell(name, disk, bound)
        for number in range(self._settings.rounds):
            for side, job in jobs.items():
                if self._has_another(cell, side, number):
                    self._bar.update(self._task, description=f"{name}, {disk}: {side}")
                    self._once(cell, side, job, number)
                self._bar.advance(self._task)
        return cell

    def _has_another(self, cell: Cell, side: str, number: int) -> bool:
        if number == 0:
            return True
        rate = cell.images_per_s(side)
        return side not in cell.failures and rate is not None and rate >= _SLOW * cell.fastest()

    def _once(self, cell: Cell, side: str, job: Job, number: int) -> None:
        if self._settings.record is not None and side not in OTHER_SIDES:
            self._settings.record.mkdir(parents=True, exist_ok=True)
            file = self._settings.record / f"{cell.trace.replace(' ', '-')}-{cell.disk}-{side}-{number + 1}.jsonl"
            job = replace(job, record=file.resolve())
        try:
            cell.runs.setdefault(side, []).append(self._stage.run(job))
        except SideError as error:
            cell.failures[side] = str(error)
            return
        note = cell.runs[side][-1].note
        if note:
            cell.failures[side] = note


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _rounded(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _run_figures(run: Run) -> dict[str, Any]:
    return {
        "images_per_s": run.images_per_s,
        "images": run.images,
        "seconds": run.seconds,
        "stopped": run.stopped,
        "loads": run.loads,
        "loaded_bytes": run.loaded_bytes,
        "unknown": run.unknown,
    }


def _cell_figures(cell: Cell, sides: Sequence[str]) -> dict[str, Any]:
    return {
        "trace": cell.trace,
        "disk": cell.disk,
        "bound": asdict(cell.bound),
        "sides": [cell.row(side) for side in sides],
    }
