"""Commands of a checkout, added to `coserve` by tools/cli/main.py."""

import typer

from tests.bench import ablation, compute, image_cost, intake, line, load, online, paper, scheduler
from tests.bench.live import command as live
from tests.moe import bench as moe_bench
from tests.stress import commands as stress
from tools.cli.moe import moe_app
from tools.terminal.option_values import Commands


def register(app: typer.Typer) -> None:
    """Add `soak`, `fuzz`, the group `bench`, and to `moe` the fixture and its benchmark."""
    stress.register(app)
    moe_app.command()(moe_bench.fixture)
    moe_app.command()(moe_bench.bench)
    bench_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Measure this machine against itself.")
    app.add_typer(bench_app, name="bench", rich_help_panel="For developers")
    for benchmark in (line, load, ablation, compute, live, online, paper, scheduler, intake, image_cost):
        benchmark.register(bench_app)
