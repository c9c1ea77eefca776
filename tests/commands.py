"""Commands of a checkout, added to `coserve` by tools/cli/main.py."""

import typer

from tests.bench import (
    ablation,
    compute,
    dashboard,
    fairness,
    image_cost,
    intake,
    online,
    paper,
    plant,
    scheduler,
    upkeep,
)
from tests.bench.live import command as live
from tests.stress import commands as stress


def register(app: typer.Typer, bench_app: typer.Typer) -> None:
    """Add `soak` and `fuzz` to `app` and the other benchmarks to `bench_app`."""
    stress.register(app)
    measured = (intake, image_cost, fairness, upkeep, dashboard, plant)
    for benchmark in (ablation, compute, live, online, paper, scheduler, *measured):
        benchmark.register(bench_app)
