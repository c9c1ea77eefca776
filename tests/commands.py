"""Commands of a checkout, added to `coserve` by tools/cli/main.py."""

import typer

from tests.bench import (
    ablation,
    cluster,
    compute,
    dashboard,
    fairness,
    families,
    image_cost,
    intake,
    line,
    load,
    network,
    online,
    paper,
    plant,
    scheduler,
    shadow,
    upkeep,
)
from tests.bench.live import command as live
from tests.moe import bench as moe_bench
from tests.moe import fixture as moe_fixture
from tests.stress import commands as stress
from tools.cli.moe import moe_app
from tools.terminal.option_values import Commands


def register(app: typer.Typer) -> None:
    """Add `soak`, `fuzz`, the group `bench`, and to `moe` the fixture and its benchmark."""
    stress.register(app)
    moe_app.command()(moe_fixture.fixture)
    moe_app.command()(moe_bench.bench)
    bench_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Measure this machine against itself.")
    app.add_typer(bench_app, name="bench", rich_help_panel="For developers")
    measured = (intake, image_cost, fairness, upkeep, dashboard, plant)
    for benchmark in (
        line,
        load,
        ablation,
        compute,
        families,
        live,
        network,
        online,
        paper,
        scheduler,
        shadow,
        cluster,
        *measured,
    ):
        benchmark.register(bench_app)
