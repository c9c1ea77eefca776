"""`coserve bench …`: this machine against itself, each claim with its peer in the same run."""

import typer

from tools.bench import (
    backup,
    compute,
    dashboard,
    decoding,
    fairness,
    intake,
    line,
    live,
    load,
    online,
    plant,
    scheduler,
    upkeep,
)

bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine against itself.")


def register(app: typer.Typer) -> None:
    """Add `bench` to `app`; each benchmark has a module of its own."""
    app.add_typer(bench_app, name="bench")
    sides = (line, live, online, load, compute, scheduler, intake, decoding, fairness, backup, upkeep, dashboard, plant)
    for module in sides:
        module.register(bench_app)
