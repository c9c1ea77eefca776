"""The command that makes a line to look at: demo."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tools.terminal.console import fail


def must_be_a_checkout() -> None:
    """End the command where rendered boards are not there: they come with the repository, not with a wheel."""
    if find_spec("tools.demo") is None:
        fail("rendered boards come with CoServe's repository, not with an installed line: clone it, `make demo`", 2)


def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where the line is made.")] = Path("demo"),
    prepare_only: Annotated[bool, typer.Option("--prepare-only", help="Make the line, do not run it.")] = False,
    boards: Annotated[int, typer.Option(min=1, help="Boards that the camera shows.")] = 20,
    seed: Annotated[int, typer.Option(help="Which boards: another seed, other boards.")] = 7,
    train: Annotated[bool, typer.Option("--train", help="Make the experts again in DIR/experts: hours.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Judge 400 boards with the line in DIR: minutes.")] = False,
) -> None:
    """Make a small line (rendered boards, trained experts, rules), run it, and show verdicts beside the truth.

    Example: coserve demo --dir demo
    """
    must_be_a_checkout()
    from tools.demo.run import run_demo
    from tools.query.formats import clean_up_on_signals

    clean_up_on_signals()
    if train or measure:
        from tools.demo import recipe

        (recipe.train if train else recipe.measure_line)(folder)
    else:
        raise SystemExit(run_demo(folder, prepare_only=prepare_only, boards=boards, seed=seed))
