"""The comparison of `coserve bench live`: interleaved runs of all sides, medians, and the bound of the machine."""

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from daemon.units import size_text
from experts.spec import ArchitectureId, ExpertId
from tests.bench.live.expert_files import DISKS, Disk
from tests.bench.live.image_trace import ImageTrace
from tests.bench.live.libraries import library_versions, missing_library
from tests.bench.live.sides import ALONE, LADDER, PLUS, SAMBA, SIDES, THIN, LiveSetup, SideResult
from tests.bench.processes import RunError
from tests.bench.rounds import Runs, Spread, ratios, run_in_turn, spread
from tests.bench.tables import print_rows
from tools.simulate.bound import Use, bound_of
from tools.terminal.console import console, errors


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
    together, bytes_per_s = (
        dict.fromkeys(setup.options.devices, float(setup.options.executors)),
        setup.costs.bytes_per_s(disk),
    )
    bound = bound_of(uses, setup.costs.rows, together, setup.memory_bytes, bytes_per_s)
    return LiveBound(bound.compute_s, bound.load_s, len(trace.images) / bound.seconds)


@dataclass(slots=True)
class LiveCell:
    """One trace on one disk: the runs of each side, the bound, and why sides failed."""

    trace: str
    disk: Disk
    bound: LiveBound
    runs: Runs[SideResult] = field(default_factory=dict[str, list[SideResult]])
    failures: dict[str, str] = field(default_factory=dict[str, str])

    def rates(self, side: str) -> list[float]:
        """Return images per second, round by round."""
        return [run.images_per_s for run in self.runs.get(side, [])]

    def ratio(self, side: str, base: str) -> Spread | None:
        """Return the ratios of the rounds in which both ran; None if there is none."""
        by_round = ratios(self.rates(side), self.rates(base))
        return spread(by_round) if by_round else None

    def best_other(self) -> list[str]:
        """Return the fastest side that has neither our slots nor one of our policies, if one ran."""
        others = [side for side in self.runs if self.runs[side] and not SIDES[side].is_ours]
        return sorted(others, key=lambda side: median(self.rates(side)))[-1:]

    def row(self, side: str) -> dict[str, Any]:
        """Return all figures of one side, for JSON and for tables."""
        runs = self.runs.get(side, [])
        rates = self.rates(side)
        waits = [run.waits_s for run in runs if run.waits_s]
        return {
            "side": side,
            "images_per_s": spread(rates)._asdict() if rates else None,
            "images": _median([run.images for run in runs]),
            "stopped": any(run.stopped for run in runs),
            "loads": _median([run.loads for run in runs]),
            "p50_wait_s": _median([float(np.quantile(each, 0.5)) for each in waits]),
            "p95_wait_s": _median([float(np.quantile(each, 0.95)) for each in waits]),
            "share_of_bound": median(rates) / self.bound.images_per_s if rates else None,
            "peak_bytes": _median([run.peak_bytes for run in runs]),
            "failure": self.failures.get(side),
        }

    def gains(self) -> dict[str, dict[str, Spread | None]]:
        """Return what each idea brings, added to those before it and alone on the base, and all of them together."""
        ideas = tuple(ALONE)
        added = {idea: self.ratio(side, before) for idea, before, side in zip(ideas, LADDER, LADDER[1:], strict=False)}
        return {
            "over samba, each added to the one before": {**added, "together": self.ratio(LADDER[-1], LADDER[0])},
            "over samba, each alone": {idea: self.ratio(side, SAMBA) for idea, side in ALONE.items()},
            f"{PLUS} over the best side without ours": {best: self.ratio(PLUS, best) for best in self.best_other()},
            f"over {PLUS}": {"int8 files": self.ratio(THIN, PLUS)},
        }


def run_cell(
    setup: LiveSetup, trace: ImageTrace, disk: Disk, sides: tuple[str, ...], rounds: int, on_run: Callable[[str], None]
) -> LiveCell:
    """Run every side in turn, round after round; `on_run` gets the name of each run before it starts."""
    cell = LiveCell(trace.order, disk, live_bound(setup, trace, disk))

    def run(side: str) -> SideResult | None:
        work = setup.side_input(side, trace, disk)
        try:
            result = setup.run(work)
        except RunError as error:
            cell.failures[side] = str(error)
            return None
        if result.failure:
            cell.failures[side] = result.failure
        return result

    runs = run_in_turn(
        {side: partial(run, side) for side in sides},
        rounds,
        on_run=lambda side: on_run(f"{trace.order}, {disk}: {side}"),
        is_wanted=lambda side, _runs: side not in cell.failures,
    )
    cell.runs = {side: [each for each in own if each is not None] for side, own in runs.items()}
    return cell


def live_figures(setup: LiveSetup, cells: list[LiveCell], sides: tuple[str, ...]) -> dict[str, Any]:
    """Return everything that was measured, for JSON."""
    costs = setup.costs
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        "options": asdict(setup.options) | {"folder": str(setup.options.folder)},
        "experts_bytes": sum(spec.weights_bytes for spec in setup.specs.values()),
        "memory_bytes": setup.memory_bytes,
        "libraries": library_versions(),
        "disks": {disk: costs.bytes_per_s(disk) for disk in DISKS},
        "measured": asdict(costs),
        "cells": [
            {
                "trace": cell.trace,
                "disk": cell.disk,
                "bound": asdict(cell.bound),
                "sides": [cell.row(side) for side in sides],
                "gains": {
                    kind: {idea: ratio and ratio._asdict() for idea, ratio in of_kind.items()}
                    for kind, of_kind in cell.gains().items()
                },
            }
            for cell in cells
        ],
    }


def show(setup: LiveSetup, cells: list[LiveCell], sides: tuple[str, ...]) -> None:
    """Print for each cell a table and what each idea brings, and the conditions."""
    for cell in cells:
        bound = cell.bound
        title = (
            f"{cell.trace} trace, {cell.disk} disk: bound {bound.images_per_s:.1f} images/s"
            f" (compute {bound.compute_s:.1f} s, loads {bound.load_s:.1f} s)"
        )
        print_rows(title, [_shown(cell.row(side)) for side in sides])
        for kind, gains in cell.gains().items():
            if shown := ", ".join(f"{idea} × {of.text(2)}" for idea, of in gains.items() if of is not None):
                console.print(f"{kind}: {shown}", markup=False)
        for side, failure in cell.failures.items():
            errors.print(f"{side}, {cell.trace}, {cell.disk}: {failure}", markup=False)
    options, recipe = setup.options, setup.options.recipe
    console.print(
        f"{recipe.classifiers} {recipe.classifier}, {recipe.detectors} {recipe.detector}, random weights, float32;"
        f" memory for {size_text(setup.memory_bytes)} of them; {options.requests} images, all waiting;"
        f" {options.executors} executors on {' and '.join(options.devices)}, {options.threads} threads; cold disk:"
        f" {size_text(setup.costs.cold_bytes_per_s)}/s ({setup.costs.read_method})\n"
        "* stopped after 300 images, or at the limit; it serves them in order, so that these show the rate\n"
        "range: lowest to highest of the rounds; p50, p95: wait from arrival to the start of the first expert's batch;"
        " bound: share of it; memory: most at once, all processes of a side",
        markup=False,
    )


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    rate, peak = row["images_per_s"], row["peak_bytes"]
    text = Spread(**rate).text(1) + ("*" if row["stopped"] else "") if rate else row["failure"] and "failed"
    return {
        "side": row["side"],
        "images/s (range)": "not installed" if missing_library(SIDES[row["side"]].library) else text,
        "loads": row["loads"],
        "p50 s": row["p50_wait_s"],
        "p95 s": row["p95_wait_s"],
        "bound": row["share_of_bound"],
        "memory": peak and size_text(peak),
    }


def _median(values: list[float] | list[int]) -> float | None:
    return median(values) if values else None
