"""What a budget, a period or a threshold costs in perplexity, point by point: the curves of `coserve moe bench`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experts.moe.errors import ModelError
from tools.cli.console import console
from tools.cli.progress import Bars
from tools.moe.evaluate import HeldOutPrompt, TextQuality, held_out_prompts, open_runtime, perplexity
from tools.moe.load_curve import brownout_points, scheduler_points

SHARES = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
PERIODS = (1, 2, 5, 10, 20, 40)
THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
WAYS = (2, 4, 8, 0)


@dataclass(frozen=True, slots=True)
class Point:
    """`series` is a line of a chart; `x` what is varied; `values` what was measured there."""

    series: str
    x: float
    values: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return {"series": self.series, "x": self.x, **self.values}


def measure_curves(checkpoint: Path) -> dict[str, list[dict[str, Any]]]:
    """Every curve by its name; one that lacks what must be prepared is empty, and the reason printed."""
    measured: dict[str, list[dict[str, Any]]] = {}
    curves = {
        "budget": budget_curve,
        "period": period_curve,
        "threshold": threshold_curve,
        "load": load_curve,
        "brownout_load": brownout_load_curve,
    }
    with Bars(console=console) as progress:
        for name, curve in curves.items():
            bar = progress.add_task(name, total=None)
            try:
                measured[name] = [point.as_dict() for point in curve(checkpoint, lambda at=bar: progress.advance(at))]
            except ModelError as error:
                measured[name] = []
                console.print(f"no curve of the {name}: {error}", markup=False)
    return measured


def budget_curve(checkpoint: Path, tick: Callable[[], None]) -> list[Point]:
    """Perplexity over the share of experts in memory.

    SwapMoE's experts change between steps: a third of each prompt comes token by token, which others do not notice.
    """
    prompts = held_out_prompts(checkpoint, of_domain=4, length=192, mixed=False)
    points: list[Point] = []
    for mode in ("swapmoe", "prune", "popularity"):
        for share in SHARES:
            decoded = 64 if mode == "swapmoe" else 0
            found, _ = _served(checkpoint, mode, share, {}, prompts, decoded)
            points.append(Point(mode, share, {"perplexity": found.perplexity}))
            tick()
    return points


def period_curve(checkpoint: Path, tick: Callable[[], None]) -> list[Point]:
    """Perplexity and loads over the prompts from one choice of experts to the next, with half of the experts."""
    prompts = held_out_prompts(checkpoint, of_domain=24, length=128)
    points: list[Point] = []
    for period in PERIODS:
        found, _ = _served(checkpoint, "emoe", 0.5, {"period": period}, prompts)
        loads = found.counts.fetches / len(prompts)
        points.append(Point("emoe", period, {"perplexity": found.perplexity, "loads_per_prompt": loads}))
        tick()
    return points


def threshold_curve(checkpoint: Path, tick: Callable[[], None]) -> list[Point]:
    """Perplexity and experts run, of those the gates asked for, over threshold and way; way 0 is full brownout."""
    prompts = held_out_prompts(checkpoint, of_domain=6, length=128)
    points: list[Point] = []
    for way in WAYS:
        for threshold in THRESHOLDS:
            found, mode = _served(checkpoint, "brownout", 1.0, {"way": way, "threshold": threshold}, prompts)
            accesses = mode.accesses["prefill"].share
            series = f"way {way}" if way else "full"
            points.append(Point(series, threshold, {"perplexity": found.perplexity, "accesses": accesses}))
            tick()
    return points


def load_curve(checkpoint: Path, tick: Callable[[], None]) -> list[Point]:
    """Requests over their SLO, by load: eMoE's scheduler and first come, first served (simulated clock)."""
    return [_late(point, tick) for point in scheduler_points(checkpoint)]


def brownout_load_curve(checkpoint: Path, tick: Callable[[], None]) -> list[Point]:
    """Tokens over their phase's SLO, by load: threshold 1 and SALC's (simulated clock, measured expert accesses)."""
    return [_late(point, tick) for point in brownout_points(checkpoint)]


def _late(point: tuple[str, float, float], tick: Callable[[], None]) -> Point:
    tick()
    series, load, share = point
    return Point(series, load, {"violations": share})


def _served(
    checkpoint: Path, mode: str, share: float, options: dict[str, Any], prompts: list[HeldOutPrompt], decoded: int = 0
) -> tuple[TextQuality, Any]:
    runtime = open_runtime(checkpoint, mode, share=share, options=options)
    try:
        return perplexity(runtime, prompts, decoded=decoded), runtime.mode
    finally:
        runtime.close()
