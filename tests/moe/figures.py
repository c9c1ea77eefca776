"""Draw the curves of docs/moe.md on the trained fixture: `python -m tests.moe.figures FOLDER` (half an hour)."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

from experts.moe.modes.brownout.mode import Brownout
from experts.moe.policy.schedule import FirstCome, SloSlack, TaskProfiles
from tests.moe.burst import ControlledThreshold, StaticThreshold, measure_accesses, scene_of
from tests.moe.fixture_emoe import FIXTURE, emoe_loading, measured_machine
from tests.moe.load import LIMITS, TASKS, LoadOutcome, capacity_per_s, poisson, replay, slos
from tools.moe.evaluate import HeldOutPrompt, TextQuality, held_out_prompts, open_runtime, perplexity

_LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 1.8)
_COLOURS = ("#2f6f9f", "#b0653a", "#5a8f4c", "#7a5a9c", "#444444", "#a3294a")

#: A series, its x, and the values of its panels.
Point = tuple[str, float, tuple[float, ...]]


def served(
    mode: str, share: float, options: dict[str, Any], prompts: list[HeldOutPrompt], decoded: int = 0
) -> tuple[TextQuality, Any]:
    runtime = open_runtime(FIXTURE, mode, share=share, options=options)
    try:
        return perplexity(runtime, prompts, decoded=decoded), runtime.mode
    finally:
        runtime.close()


def budget() -> Iterator[Point]:
    """Yield perplexity by memory. A third of SwapMoE's prompts is decoded, as its experts change between steps."""
    prompts = held_out_prompts(FIXTURE, of_domain=4, length=192, mixed=False)
    for mode in ("swapmoe", "prune", "popularity"):
        for share in (0.125, 0.25, 0.375, 0.5, 0.75, 1.0):
            quality, _ = served(mode, share, {}, prompts, decoded=64 if mode == "swapmoe" else 0)
            yield mode, share, (quality.perplexity,)


def period() -> Iterator[Point]:
    """Yield perplexity and loads of eMoE by its period, with half of the experts."""
    prompts = held_out_prompts(FIXTURE, of_domain=24, length=128)
    for prompts_between in (1, 2, 5, 10, 20, 40):
        quality, _ = served("emoe", 0.5, {"period": prompts_between}, prompts)
        yield "emoe", prompts_between, (quality.perplexity, quality.counts.fetches / len(prompts))


def threshold() -> Iterator[Point]:
    """Yield perplexity and experts run by threshold and way; way 0 is full brownout."""
    prompts = held_out_prompts(FIXTURE, of_domain=6, length=128)
    for way in (2, 4, 8, 0):
        for value in (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0):
            quality, mode = served("brownout", 1.0, {"way": way, "threshold": value}, prompts)
            yield f"way {way}" if way else "full", value, (quality.perplexity, mode.accesses["prefill"].share)


def load() -> Iterator[Point]:
    """Yield requests over their SLO by load: eMoE's scheduler and first come, first served."""
    machine = measured_machine()
    slo_s = slos(TASKS, machine)
    capacity = capacity_per_s(TASKS, FirstCome(LIMITS), machine, emoe_loading())
    for share in _LOADS:
        trace = poisson(TASKS, share * capacity, 600, 3, slo_s=slo_s)
        first = replay(trace, FirstCome(LIMITS), machine, emoe_loading())
        yield "first come, first served", share, (first.violations,)
        profiles = TaskProfiles({task.name: task.output_tokens for task in TASKS})
        scheduler = SloSlack(LIMITS, machine.compute, profiles)
        yield "eMoE, by slack", share, (replay(trace, scheduler, machine, emoe_loading(), profiles).violations,)


def brownout_load() -> Iterator[Point]:
    """Yield tokens over their phase's SLO by load: threshold 1 and SALC's."""
    runtime = open_runtime(FIXTURE, "brownout", options={"way": 4})
    assert isinstance(runtime.mode, Brownout)
    table = measure_accesses(runtime, runtime.mode, held_out_prompts(FIXTURE, of_domain=12))
    runtime.close()
    scene = scene_of(table)

    def late_share(outcome: LoadOutcome) -> float:
        latencies = [(s, slo) for phase, slo in scene.slo_s.items() for s in outcome.token_latencies_s(phase)]
        return sum(latency_s > slo_s for latency_s, slo_s in latencies) / len(latencies)

    for share in _LOADS:
        trace = poisson(scene.tasks, share * scene.capacity_per_s, 600, 3)
        yield "threshold 1", share, (late_share(scene.replay(trace, StaticThreshold(table))),)
        controlled = ControlledThreshold(table, scene.slo_s)
        yield "threshold by SALC", share, (late_share(scene.replay(trace, controlled)),)


_PERPLEXITY = "perplexity, held-out files"
#: By name: the points, the axis across, and the panels with their axes, logarithmic or not.
CURVES = {
    "budget": (budget, "share of experts in memory", ((_PERPLEXITY, True),)),
    "period": (period, "prompts from choice to choice", ((_PERPLEXITY, False), ("loads a prompt", True))),
    "threshold": (threshold, "threshold", ((_PERPLEXITY, True), ("experts run, of those asked for", False))),
    "load": (load, "load, of the capacity of first come, first served", (("share of requests over their SLO", False),)),
    "brownout-load": (
        brownout_load, "load, of the capacity of threshold 1", (("share of tokens over their SLO", False),),
    ),
}  # fmt: skip


def draw(points: list[Point], across: str, panels: tuple[tuple[str, bool], ...], file: Path) -> None:
    """Draw a panel for each value, with a line for each series."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4.8 * len(panels), 3.6), squeeze=False, layout="constrained")
    for value, (panel, (label, is_logarithmic)) in enumerate(zip(axes.flat, panels, strict=True)):
        for colour, series in zip(_COLOURS, dict.fromkeys(name for name, _, _ in points), strict=False):
            line = [(x, values[value]) for name, x, values in points if name == series]
            panel.plot(*zip(*line, strict=True), marker="o", markersize=4, color=colour, label=series)
        panel.set(xlabel=across, ylabel=label)
        if is_logarithmic:
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_locator(NullLocator())
        panel.legend(fontsize=8, frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for curve, (measure, across, panels) in CURVES.items():
        print(curve, flush=True)
        draw(list(measure()), across, panels, folder / f"moe-{curve}.png")
