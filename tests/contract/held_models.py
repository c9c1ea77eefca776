"""`python -m tests.contract.held_models CONFIG` is `coserve run`, whose language models can be made to stand still.

Each computes as many steps as the file `steps` beside CONFIG says, then waits until that is gone, or the daemon stops.
"""

import math
import sys
import time
from pathlib import Path
from typing import Any

from daemon.language.model_thread import ModelThread
from daemon.serve import serve

STEPS = "steps"


def hold_after(steps: int, folder: Path) -> None:
    """Let models that are idle compute so many steps of what comes next; `(folder / STEPS).unlink()` lets go."""
    fresh = folder / f".{STEPS}"
    fresh.write_text(str(steps), encoding="ascii")
    fresh.replace(folder / STEPS)


def main(config: Path) -> int:
    file, really = config.parent / STEPS, ModelThread._compute

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
    return serve(config)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
