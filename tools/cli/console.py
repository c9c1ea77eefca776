"""How commands talk: tables for people, JSON for programs, one sentence for what went wrong."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console(highlight=False, soft_wrap=True, emoji=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

PROGRAM = "coserve"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The line's coserve.yaml.", show_default=False)]
ConfigOption = Annotated[
    Path, typer.Option("--config", metavar="CONFIG", envvar="COSERVE_CONFIG", help="The line's coserve.yaml.")
]


def default_config(here: Path, service: Path) -> Path:
    """The configuration that a command means where none is named: the one `here`, else that of the service."""
    return service if service.is_file() and not here.is_file() else here


DEFAULT_CONFIG = default_config(Path("coserve.yaml"), Path("/etc/coserve/coserve.yaml"))


def fail(message: str, status: int) -> NoReturn:
    """Say on stderr why it went wrong and leave with `status` (1: the answer is no, 2: wrong use)."""
    sys.stdout.flush()
    errors.print(f"coserve: {message}", markup=False, style="red" if errors.is_terminal else None)
    raise SystemExit(status)


def print_json(value: Any) -> None:
    """One JSON document on stdout, non-ASCII as it is."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table for a person; None prints as a dash."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*("–" if cell is None else Text(str(cell)) for cell in row))  # what is in it is no markup
    console.print(table)


def as_typed(words: str) -> str:
    """A command of ours that whoever started this one can paste: `coserve check line/coserve.yaml`."""
    return f"{_program()} {words}"


def _program() -> str:
    """`coserve` where the PATH leads to it; else as this process was started, or beside its Python."""
    started = Path(sys.argv[0])
    if started.name != PROGRAM:
        started = Path(sys.executable).with_name(PROGRAM)
        if started.is_relative_to(Path.cwd()):
            started = started.relative_to(Path.cwd())
    found = shutil.which(PROGRAM)
    if not started.is_file() or (found is not None and started.samefile(found)):
        return PROGRAM
    return shlex.quote(str(started))


def quiet_start(process_env: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a child process that is one of our own commands."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **(process_env or {})}
