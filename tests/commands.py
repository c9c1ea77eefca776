"""Commands of a checkout, added to `coserve` by tools/cli/main.py."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tests.bench import ablation, compute, image_cost, intake, line, load, online, paper, scheduler
from tests.bench.live import command as live
from tests.moe import bench as moe_bench
from tools.cli.moe import moe_app
from tools.terminal.console import errors, print_json
from tools.terminal.option_values import Commands

_BENCHMARKS = {
    "line": line.bench_line,
    "load": load.bench_load,
    "ablation": ablation.bench_ablation,
    "compute": compute.bench_compute,
    "live": live.bench_live,
    "online": online.bench_online,
    "paper": paper.bench_paper,
    "scheduler": scheduler.bench_scheduler,
    "intake": intake.bench_intake,
    "image-cost": image_cost.bench_image_cost,
}


def register(app: typer.Typer) -> None:
    """Add `soak`, the group `bench`, and to `moe` the fixture and its benchmark."""
    app.command(rich_help_panel="For developers")(soak)
    moe_app.command()(moe_bench.fixture)
    moe_app.command()(moe_bench.bench)
    bench_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Measure this machine against itself.")
    app.add_typer(bench_app, name="bench", rich_help_panel="For developers")
    for name, benchmark in _BENCHMARKS.items():
        bench_app.command(name)(benchmark)


def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 60.0,
    folder: Annotated[Path, typer.Option("--dir", help="Where soak.json and the daemon's log go.")] = Path(
        "build/soak"
    ),
) -> None:
    """Run a small line under load and look whether anything grows: memory, handles, threads, waits, lost images.

    Publishers at a steady rate, a consumer, queries, reloads, and hostile peers in turn. Exit status 1 where
    something grew or was lost.

    Example: coserve soak --minutes 60
    """
    from tests.stress.soak import run_soak

    def show_sample(sample: dict[str, Any]) -> None:
        errors.print(
            f"{sample['at_s'] / 60:6.1f} min  {sample['rss_mb']:7.1f} MB  {sample['handles']} handles"
            f"  {sample['threads']} threads  p99 {sample['p99_ms']} ms  backlog {sample['backlog']}  {sample['attack']}"
        )

    figures = run_soak(minutes, folder, show_sample)
    print_json({name: value for name, value in figures.items() if name != "samples"})
    raise SystemExit(0 if all(figures["verdicts"].values()) else 1)
