"""The comparison of `coserve bench live`: interleaved runs of all sides, medians, and the bound of the machine."""

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from daemon.units import size_text
from experts.spec import ArchitectureId, ExpertId
from tests.bench.live.expert_files import DISKS, PACED_BYTES_PER_S, Disk
from tests.bench.live.image_trace import ImageTrace
from tests.bench.live.sides import NAIVE, ORDINARY, OTHER_SIDES, RAY, LiveSetup, SideError, SideResult
from tests.bench.tables import print_narrow, rounded
from tools.simulate.bound import Use, bound_of
from tools.terminal.console import console, errors

#: Sides slower than this share of the fastest run once.
_SLOW = 0.1
#: Every side is compared with these; the texts head their columns.
_BASES = {"coserve": "/coserve", ORDINARY: "/ordin.", NAIVE: "/naive", RAY: "/Ray"}


@dataclass(frozen=True, slots=True)
class LiveBound:
    """The rate that no scheduler exceeds, and the seconds that the whole trace needs for computing and for loading."""

    compute_s: float
    load_s: float
    images_per_s: float


def live_bound(setup: LiveSetup, trace: ImageTrace, disk: Disk) -> LiveBound:
    """Return the bound of one trace: all executors without a pause, and every expert read once that does not fit."""
    specs = {name: setup.specs[ExpertId(name)] for name in trace.visits()}
    uses = [
        Use(ArchitectureId(specs[name].layout), specs[name].weights_bytes, images)
        for name, images in trace.visits().items()
    ]
    together, bytes_per_s = {"cpu": float(setup.options.executors)}, setup.costs.bytes_per_s(disk)
    bound = bound_of(uses, setup.costs.rows, together, setup.memory_bytes, bytes_per_s)
    return LiveBound(bound.compute_s, bound.load_s, len(trace.images) / bound.seconds)


@dataclass(slots=True)
class LiveCell:
    """One trace on one disk: the runs of each side, the bound, and why sides failed."""

    trace: str
    disk: Disk
    bound: LiveBound
    runs: dict[str, list[SideResult]] = field(default_factory=dict[str, list[SideResult]])
    failures: dict[str, str] = field(default_factory=dict[str, str])

    def images_per_s(self, side: str) -> float | None:
        return _median([run.images_per_s for run in self.runs.get(side, [])])

    def is_worth_another(self, side: str) -> bool:
        """Return True if a side has not failed, and is not so slow that one run shows enough."""
        rate = self.images_per_s(side)
        fastest = max((self.images_per_s(each) or 0.0 for each in self.runs), default=0.0)
        return side not in self.failures and (rate is None or rate >= _SLOW * fastest)

    def row(self, side: str) -> dict[str, Any]:
        """Return all figures of one side, for JSON and for tables."""
        runs = self.runs.get(side, [])
        rate = self.images_per_s(side)
        waits = [run.waits_s for run in runs if run.waits_s]
        bases = {base: self.images_per_s(base) for base in _BASES}
        counted = ("images", "seconds", "stopped", "loads", "loaded_bytes", "unknown")
        return {
            "side": side,
            "images_per_s": rate,
            "images": _median([run.images for run in runs]),
            "stopped": any(run.stopped for run in runs),
            "loads": _median([run.loads for run in runs]),
            "p50_wait_s": _median([float(np.quantile(each, 0.5)) for each in waits]),
            "p95_wait_s": _median([float(np.quantile(each, 0.95)) for each in waits]),
            "share_of_bound": None if rate is None else rate / self.bound.images_per_s,
            "ratio_to": {
                base: rate / base_rate if rate is not None and base_rate else None for base, base_rate in bases.items()
            },
            "runs": [
                {"images_per_s": run.images_per_s} | {name: getattr(run, name) for name in counted} for run in runs
            ],
            "failure": self.failures.get(side),
        }


def run_cell(
    setup: LiveSetup,
    trace: ImageTrace,
    disk: Disk,
    sides: tuple[str, ...],
    rounds: int,
    record: Path | None,
    on_run: Callable[[str], None],
) -> LiveCell:
    """Run every side in turn, round after round; `on_run` hears the name of the next run."""
    cell = LiveCell(trace.order, disk, live_bound(setup, trace, disk))
    for number in range(rounds):
        for side in sides:
            on_run(f"{trace.order}, {disk}: {side}")
            if not cell.is_worth_another(side):
                continue
            work = setup.side_input(side, trace, disk)
            if record is not None and side not in OTHER_SIDES:
                record.mkdir(parents=True, exist_ok=True)
                file = record / f"{trace.order}-{disk}-{side}-{number + 1}.jsonl"
                work = replace(work, record=file.resolve())
            try:
                result = setup.run(work)
            except SideError as error:
                cell.failures[side] = str(error)
                continue
            cell.runs.setdefault(side, []).append(result)
            if result.failure:
                cell.failures[side] = result.failure
    return cell


def live_figures(setup: LiveSetup, cells: list[LiveCell], sides: tuple[str, ...]) -> dict[str, Any]:
    """Return everything that was measured, for JSON."""
    options, costs = setup.options, setup.costs
    total_bytes = sum(spec.weights_bytes for spec in setup.specs.values())
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        "experts": asdict(options.recipe) | {"dtype": "float32", "values": "random", "bytes": total_bytes},
        "requests": options.requests,
        "memory_bytes": setup.memory_bytes,
        "executors": options.executors,
        "threads": options.threads,
        "limit_s": options.limit_s,
        "disks": {disk: costs.bytes_per_s(disk) for disk in DISKS},
        "measured": asdict(costs),
        "cells": [
            {
                "trace": cell.trace,
                "disk": cell.disk,
                "bound": asdict(cell.bound),
                "sides": [cell.row(side) for side in sides],
            }
            for cell in cells
        ],
    }


def show(setup: LiveSetup, cells: list[LiveCell], sides: tuple[str, ...]) -> None:
    """Print the conditions, a table for each cell, and the failures."""
    _show_conditions(setup)
    for cell in cells:
        bound = cell.bound
        title = (
            f"{cell.trace} trace, {cell.disk} disk: bound {bound.images_per_s:.1f} images/s"
            f" (compute {bound.compute_s:.1f} s, loads {bound.load_s:.1f} s)"
        )
        columns = ("side", "images/s", "loads", "p50 s", "p95 s", "bound", *_BASES.values())
        print_narrow(title, columns, [_cells(cell.row(side)) for side in sides])
        for side, failure in cell.failures.items():
            errors.print(f"{side}, {cell.trace}, {cell.disk}: {failure}", markup=False)
    console.print(
        "* stopped at the limit: the rate is over the finished images, waits are of these (the others wait longer)\n"
        "p50, p95: wait from arrival to the start of the first expert's batch; bound: share of it; /coserve,"
        " /ordin., /naive, /Ray: times coserve, samba with ordinary loading, naive, Ray Serve"
    )


def _show_conditions(setup: LiveSetup) -> None:
    options, costs, recipe = setup.options, setup.costs, setup.options.recipe
    total_bytes = sum(spec.weights_bytes for spec in setup.specs.values())
    console.print(
        f"{recipe.classifiers} {recipe.classifier} and {recipe.detectors} {recipe.detector}, random weights,"
        f" float32, {size_text(total_bytes)}; memory for {size_text(setup.memory_bytes)} of them;"
        f" {options.requests} images, all waiting; {options.executors} executors, {options.threads} threads on"
        f" {os.cpu_count()} cores\n"
        f"cold disk: {size_text(costs.cold_bytes_per_s)}/s past the page cache ({costs.read_method});"
        f" paced disk: the same through a reader that sleeps, {size_text(PACED_BYTES_PER_S)}/s"
    )
    for row in costs.rows:
        console.print(
            f"{row.architecture}: {row.k_s * 1e3:.1f} ms per image + {row.b_s * 1e3:.1f} ms per batch,"
            f" best from batches of {row.max_batch}, each executor while all compute"
        )


def _cells(row: dict[str, Any]) -> list[Any]:
    rate = rounded(row["images_per_s"], 2)
    return [
        row["side"],
        f"{rate}*" if row["stopped"] else rate,
        row["loads"],
        rounded(row["p50_wait_s"], 1),
        rounded(row["p95_wait_s"], 1),
        rounded(row["share_of_bound"], 2),
        *(rounded(ratio, 2) for ratio in row["ratio_to"].values()),
    ]


def _median(values: list[float] | list[int]) -> float | None:
    return median(values) if values else None
