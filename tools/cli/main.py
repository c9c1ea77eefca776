"""The command `coserve`. Torch is imported only by sub-commands that need it.

Exit status: 0 done, 1 it ran and the answer is no, 2 wrong use (or the daemon could not start).
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import typer

from tools.cli import camera, experts, line, moe, plant, results, setup, stored, train
from tools.terminal.option_values import Commands

app = typer.Typer(
    name="coserve",
    cls=Commands,
    help="Visual inspection with hundreds of experts on one PC.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

_DAILY, _SETUP, _DEVELOPERS = "Every day", "Setting up", "For developers"
#: Commands, and groups of commands with their names, by panel in the order in which `coserve --help` lists them.
_COMMANDS: dict[str, tuple[Any, ...]] = {
    _DAILY: (
        *(line.status, results.results, results.explain, results.review, results.report, stored.export),
        results.changes,
        *(camera.camera, line.reload, line.rollback, line.drain, line.queues, line.pin, line.unload, line.limits),
        *(stored.backup, ("dataset", camera.dataset_app), ("db", stored.db_app), ("experts", experts.experts_app)),
    ),
    _SETUP: (
        *(setup.demo, setup.init, ("train", train.train_app), train.import_expert, train.learn),
        *(("rules", line.rules_app), line.check, setup.doctor),
        *(line.run, setup.install_service, stored.restore, line.worker),
        *(("keys", line.keys_app), ("plant", plant.plant_app), setup.profile, experts.rejudge, setup.simulate),
    ),
    _DEVELOPERS: (("moe", moe.moe_app),),
}
for panel, commands in _COMMANDS.items():
    for command in commands:
        if isinstance(command, tuple):
            app.add_typer(command[1], name=command[0], rich_help_panel=panel)
        else:
            name = command.__name__.removesuffix("_expert").replace("_", "-")
            app.command(name, rich_help_panel=panel)(command)

#: A checkout also has commands that judge CoServe itself (`bench`, `soak`). They stand under tests/, and in no wheel.
_CHECKOUT = Path(__file__).resolve().parents[2]
if (_CHECKOUT / "tests" / "commands.py").is_file():
    if str(_CHECKOUT) not in sys.path:
        sys.path.append(str(_CHECKOUT))
    # By name: `tests` stands above the tools, which must not import it.
    importlib.import_module("tests.commands").register(app)


def main() -> Any:
    """Run the command; exit quietly if the reader closes the pipe early."""
    try:
        return app()
    except BrokenPipeError:
        raise SystemExit(0) from None
