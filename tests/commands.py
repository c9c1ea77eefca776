"""Commands of a checkout, added to `coserve` by tools/cli/checkout.py."""

import typer

from tests.bench import backup, dashboard, decoding, fairness, intake, live, online, plant, scheduler, upkeep
from tests.stress import fuzz_command, soak_command


def register(app: typer.Typer, bench_app: typer.Typer) -> None:
    """Add `soak` and `fuzz` to `app` and the other benchmarks to `bench_app`."""
    for command in (soak_command, fuzz_command):
        command.register(app)
    for benchmark in (live, online, scheduler, intake, decoding, fairness, backup, upkeep, dashboard, plant):
        benchmark.register(bench_app)
