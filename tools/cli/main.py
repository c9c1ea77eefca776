"""The one command, `coserve`: what a person under the line types. Torch is imported only by commands that need it.

Exit status: 0 done, 1 it ran and the answer is no, 2 wrong use (or the daemon could not start).
"""

from typing import Any

import typer

from tools.cli import (
    backup,
    bench,
    camera,
    checkout,
    db,
    demo,
    doctor,
    experts,
    export,
    init,
    install_service,
    keys,
    line,
    moe,
    profile,
    rejudge,
    report,
    results,
    review,
    simulate,
    train,
)
from tools.cli.console import fail
from tools.cli.option_values import Commands
from tools.setup.service import ServiceError

app = typer.Typer(
    name="coserve",
    cls=Commands,
    help="Visual inspection with hundreds of experts on one PC.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
#: In the order in which `coserve --help` lists them.
_COMMANDS = (
    *(init, doctor, line, experts, demo, camera, results, export, db, train, profile, report),
    *(rejudge, review, simulate, bench, checkout, moe, keys, backup, install_service),
)
for command in _COMMANDS:
    command.register(app)


def main() -> Any:
    """Entry point: a person sees a sentence, not a traceback, when a pipe closes or a line does not start."""
    try:
        return app()
    except ServiceError as error:
        fail(str(error), status=1)
    except BrokenPipeError:
        raise SystemExit(0) from None
