"""Daemons of which a part behaves oddly, for `Line(…, command=(ODD_DAEMON, ODDITY, …))`.

- `add`, `point`, `adopt`: a reload kills it after this step (the new edition is written and nothing names it; the
  pointer names it; the drive knows it); `read-only`: it may make no edition.
- `few-handles SOFT HARD`: it has these limits of open files.
- `dying-disk`, with torch: who opens FILE waits while FILE.dies lies beside it, as for a read that never returns.
- `held-models`, with torch: its language models compute as many steps as `hold_after` says.
"""

import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from daemon.dispatch.drive import Drive
from daemon.serve import serve
from experts.editions.folder import EditionFolder, EditionWriter
from experts.reading import CachedReader
from tests.simulated import run

ODD_DAEMON = "tests.contract.odd_daemons"
STEPS = "steps"
_RELOAD: dict[str, tuple[type, str]] = {
    "add": (EditionWriter, "add"),
    "point": (EditionWriter, "point"),
    "adopt": (Drive, "take_editions"),
}


def hold_after(steps: int, folder: Path) -> None:
    """Let models that are idle compute so many steps of what comes next; `(folder / STEPS).unlink()` lets go."""
    fresh = folder / f".{STEPS}"
    fresh.write_text(str(steps), encoding="ascii")
    fresh.replace(folder / STEPS)


def _die_after(owner: type, method: str) -> None:
    step: Callable[..., None] = getattr(owner, method)

    def last(*arguments: Any, **named: Any) -> None:
        step(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, method, last)


def _let_the_disk_die() -> None:
    really = CachedReader.open

    def open_or_wait(self: CachedReader, path: Path) -> int:
        while path.with_name(path.name + ".dies").exists():
            time.sleep(0.05)
        return really(self, path)

    CachedReader.open = open_or_wait


def _hold_models(file: Path) -> None:
    from daemon.language.model_thread import ModelThread

    really = ModelThread._compute

    def allowed() -> float:
        try:
            return int(file.read_text(encoding="ascii"))
        except FileNotFoundError:
            return math.inf

    def compute(self: Any, model: Any) -> None:
        self.computed = 0 if allowed() == math.inf else getattr(self, "computed", 0) + 1
        while self.computed > allowed() and not self._stopping:
            time.sleep(0.01)
        really(self, model)

    ModelThread._compute = compute  # pyright: ignore[reportAttributeAccessIssue]


def main(oddity: str, *values: str) -> int:
    config = Path(values[-1])
    if oddity == "dying-disk":
        _let_the_disk_die()
        return serve(config)
    if oddity == "held-models":
        _hold_models(config.with_name(STEPS))
        return serve(config)
    if oddity == "few-handles":
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(values[0]), int(values[1])))
    elif oddity == "read-only":
        patch.object(EditionFolder, "may_write", lambda _: False).start()
    else:
        _die_after(*_RELOAD[oddity])
    return run(config)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
