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
from tests.bench.live.expert_files import DISKS, PACED_BYTES_PER_S, Disk
from tests.bench.live.image_trace import ImageTrace
from tests.bench.live.libraries import library_versions, missing_library
from tests.bench.live.sides import ALONE, LADDER, PLUS, SAMBA, THIN, LiveSetup, SideResult, side_of
from tests.bench.processes import RunError
from tests.bench.rounds import Runs, Spread, ratios, run_in_turn, spread
from tests.bench.tables import print_narrow, rounded
from tools.simulate.bound import Use, bound_of
from tools.terminal.console import console, errors

#: What `coserve-plus` is to reach: so many times the best side that has nothing of ours, and this share of the bound of
#: plain files; where the disk binds, so many times itself with int8 files.
GOAL_RATIO, GOAL_SHARE, GOAL_THIN = 4.0, 0.95, 2.0


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

    def best_other(self) -> str | None:
        """Return the fastest side that has neither our slots nor one of our policies."""
        others = [side for side in self.runs if self.runs[side] and not side_of(side).is_ours]
        return max(others, key=lambda side: median(self.rates(side)), default=None)

    def row(self, side: str) -> dict[str, Any]:
        """Return all figures of one side, for JSON and for tables."""
        runs = self.runs.get(side, [])
        rates = self.rates(side)
        waits = [run.waits_s for run in runs if run.waits_s]
        counted = ("images", "seconds", "stopped", "loads", "loaded_bytes", "unknown", "peak_bytes")
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
            "runs": [
                {"images_per_s": run.images_per_s} | {name: getattr(run, name) for name in counted} for run in runs
            ],
            "failure": self.failures.get(side),
        }

    def gains(self) -> dict[str, dict[str, Spread | None]]:
        """Return what each idea brings: added to those before it, and alone on the base."""
        ideas = tuple(ALONE)
        added = {idea: self.ratio(side, before) for idea, before, side in zip(ideas, LADDER, LADDER[1:], strict=False)}
        return {
            "added": {**added, "together": self.ratio(LADDER[-1], LADDER[0])},
            "alone": {idea: self.ratio(side, SAMBA) for idea, side in ALONE.items()},
        }


def run_cell(
    setup: LiveSetup,
    trace: ImageTrace,
    disk: Disk,
    sides: tuple[str, ...],
    rounds: int,
    on_run: Callable[[str], None],
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
        "window": options.window,
        "devices": dict(zip(options.devices, setup.budgets, strict=True)),
        "limit_s": options.limit_s,
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
                "best_other": cell.best_other(),
            }
            for cell in cells
        ],
    }


def show(setup: LiveSetup, cells: list[LiveCell], sides: tuple[str, ...]) -> None:
    """Print the conditions, and for each cell a table, what each idea brings, and where a goal is missed."""
    _show_conditions(setup)
    for cell in cells:
        bound = cell.bound
        title = (
            f"{cell.trace} trace, {cell.disk} disk: bound {bound.images_per_s:.1f} images/s"
            f" (compute {bound.compute_s:.1f} s, loads {bound.load_s:.1f} s)"
        )
        columns = ("side", "images/s (range)", "loads", "p50 s", "p95 s", "bound", "memory")
        print_narrow(title, columns, [_cells(cell.row(side)) for side in sides])
        gains = cell.gains()
        for kind, text in (("added", "each added to the one before"), ("alone", "each alone")):
            if shown := ", ".join(f"{idea} × {of.text(2)}" for idea, of in gains[kind].items() if of is not None):
                console.print(f"over samba, {text}: {shown}", markup=False)
        _show_goals(cell)
        for side, failure in cell.failures.items():
            errors.print(f"{side}, {cell.trace}, {cell.disk}: {failure}", markup=False)
    console.print(
        "* stopped after 300 images, or at the limit; it serves them in order, so that these show the rate\n"
        "range: lowest to highest of the rounds; p50, p95: wait from arrival to the start of the first expert's batch;"
        " bound: share of it; memory: most at once, all processes of a side",
        markup=False,
    )


def _show_goals(cell: LiveCell) -> None:
    best, rates = cell.best_other(), cell.rates(PLUS)
    if not rates:
        return
    share = median(rates) / cell.bound.images_per_s
    texts = [f"{share:.2f} of the bound ({_judged(share >= GOAL_SHARE, GOAL_SHARE)})"]
    if best is not None and (ratio := cell.ratio(PLUS, best)) is not None:
        is_met = ratio.median >= GOAL_RATIO
        texts.insert(0, f"{ratio.text(2)} × {best}, the best side without ours ({_judged(is_met, GOAL_RATIO)})")
    if (thinner := cell.ratio(THIN, PLUS)) is not None:
        is_met = thinner.median >= GOAL_THIN
        texts.append(f"with int8 files {thinner.text(2)} × ({_judged(is_met, GOAL_THIN)} where the disk binds)")
    console.print(f"{PLUS}: {'; '.join(texts)}\n", markup=False)


def _judged(is_met: bool, goal: float) -> str:
    return f"goal {goal:g} {'met' if is_met else 'missed'}"


def _show_conditions(setup: LiveSetup) -> None:
    options, costs, recipe = setup.options, setup.costs, setup.options.recipe
    total_bytes = sum(spec.weights_bytes for spec in setup.specs.values())
    devices = " and ".join(options.devices)
    console.print(
        f"{recipe.classifiers} {recipe.classifier} and {recipe.detectors} {recipe.detector}, random weights,"
        f" float32, {size_text(total_bytes)}; memory for {size_text(setup.memory_bytes)} of them;"
        f" {options.requests} images, all waiting; {options.executors} executors on {devices},"
        f" {options.threads} threads on {os.cpu_count()} cores; batches of a server's queue from {options.window}"
        " requests, of -all sides from all\n"
        f"cold disk: {size_text(costs.cold_bytes_per_s)}/s past the page cache ({costs.read_method});"
        f" paced disk: the same through a reader that sleeps, {size_text(PACED_BYTES_PER_S)}/s"
    )
    for row in costs.rows:
        console.print(
            f"{row.architecture}: {row.k_s * 1e3:.1f} ms per image + {row.b_s * 1e3:.1f} ms per batch,"
            f" best from batches of {row.max_batch}, each executor while all compute"
        )


def _cells(row: dict[str, Any]) -> list[Any]:
    rate, peak = row["images_per_s"], row["peak_bytes"]
    text = Spread(**rate).text(1) + ("*" if row["stopped"] else "") if rate else row["failure"] and "failed"
    return [
        row["side"],
        "not installed" if missing_library(side_of(row["side"]).library) else text,
        row["loads"],
        rounded(row["p50_wait_s"], 1),
        rounded(row["p95_wait_s"], 1),
        rounded(row["share_of_bound"], 2),
        peak and size_text(peak),
    ]


def _median(values: list[float] | list[int]) -> float | None:
    return median(values) if values else None
