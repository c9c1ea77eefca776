"""The one command, `coserve`: what a person under the line types. Torch is imported only by commands that need it.

Exit status: 0 done, 1 it ran and the answer is no, 2 wrong use (or the daemon could not start).
"""

from typing import Any

import typer

from tools import db, keys, operate, service_install, teach, watch
from tools.asking import command as asking
from tools.backup import command as backup
from tools.bench import command as bench
from tools.camera import cli as camera
from tools.console import fail
from tools.doctor import command as doctor
from tools.experts import command as experts
from tools.fuzz import command as fuzz
from tools.init import command as init
from tools.moe import command as moe
from tools.profile import command as profile
from tools.rejudge import command as rejudge
from tools.report import command as report
from tools.review import command as review
from tools.service import ServiceError
from tools.simulate import command as simulate
from tools.stress import command as stress
from tools.wrong_use import Commands

app = typer.Typer(
    name="coserve",
    cls=Commands,
    help="Visual inspection with hundreds of experts on one PC.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
init.register(app)
doctor.register(app)
operate.register(app)
experts.register(app)
watch.register(app)
camera.register(app)
asking.register(app)
db.register(app)
teach.register(app)
profile.register(app)
report.register(app)
rejudge.register(app)
review.register(app)
simulate.register(app)
bench.register(app)
stress.register(app)
fuzz.register(app)
moe.register(app)
keys.register(app)
backup.register(app)
service_install.register(app)


def main() -> Any:
    """Entry point: a person sees a sentence, not a traceback, when a pipe closes or a line does not start."""
    try:
        return app()
    except ServiceError as error:
        fail(str(error), status=1)
    except BrokenPipeError:
        raise SystemExit(0) from None
