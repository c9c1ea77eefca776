"""`coserve bench …`: measure this machine. A checkout has more benchmarks, which judge CoServe itself (checkout.py)."""

import typer

from tools.bench import compute, line, load

bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine against itself.")


def register(app: typer.Typer) -> None:
    """Add `bench` to `app`; each benchmark has a module of its own."""
    app.add_typer(bench_app, name="bench")
    for module in (line, load, compute):
        module.register(bench_app)
