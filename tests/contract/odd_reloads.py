"""`python -m tests.contract.odd_reloads add|point|adopt|read-only CONFIG`: a daemon that a reload kills at that step.

`add`: the new edition is written, nothing names it. `point`: the pointer names it. `adopt`: the drive knows it.
`read-only` is one that may make no edition.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daemon.dispatch.drive import Drive
from experts.editions.folder import EditionFolder, EditionWriter
from tests.simulated import run

ODD_RELOADS = "tests.contract.odd_reloads"
_STEPS: dict[str, tuple[type, str]] = {
    "add": (EditionWriter, "add"),
    "point": (EditionWriter, "point"),
    "adopt": (Drive, "take_editions"),
}


def _die_after(owner: type, method: str) -> None:
    step: Callable[..., None] = getattr(owner, method)

    def last(*arguments: Any, **named: Any) -> None:
        step(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, method, last)


if __name__ == "__main__":
    if sys.argv[1] == "read-only":
        EditionFolder.may_write = lambda _: False
    else:
        _die_after(*_STEPS[sys.argv[1]])
    sys.exit(run(Path(sys.argv[2])))
