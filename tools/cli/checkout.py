"""Commands that judge CoServe itself (`soak`, `fuzz`, most of `bench`). They stand under tests/, and in no wheel."""

import importlib
import sys
from pathlib import Path

import typer

from tools.cli.bench import bench_app

_ROOT = Path(__file__).resolve().parents[2]


def register(app: typer.Typer) -> None:
    """Add them to `app` where this is a checkout."""
    if not (_ROOT / "tests" / "commands.py").is_file():
        return
    if str(_ROOT) not in sys.path:
        sys.path.append(str(_ROOT))
    # By name: `tests` stands above the tools, which must not import it.
    importlib.import_module("tests.commands").register(app, bench_app)
