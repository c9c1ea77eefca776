"""Makes experts: trains on the user's images, imports networks, and proves that a file answers as its source.

Import `classifier` and `detector` (training commands), `fit` (parts of classifier training), `importer` and
`expert_file` (every expert is written there), `held_out` and `proof` (measures). Nothing here runs in the daemon.
"""

import re

from experts.spec import Task
from experts.vision.architectures import ARCHITECTURES, Architecture
from tools.terminal.console import CommandError


class TrainingError(CommandError):
    """A training or an import cannot start or went wrong; the text names the file or value, and what to do."""


def architecture_of(name: str, *tasks: Task) -> Architecture:
    """Return the architecture of this name, which does one of `tasks`. Raises TrainingError."""
    known = [each.name for each in ARCHITECTURES.values() if each.task in tasks]
    if name not in known:
        kinds = " or ".join({"classify": "a classifier", "detect": "a detector"}[task] for task in tasks)
        raise TrainingError(f"architecture {name!r} is unknown for {kinds}; known are {', '.join(known)}")
    return ARCHITECTURES[name]


def require_expert_id(name: str) -> None:
    """Raise TrainingError unless `name` can name an expert in the catalog, in rules and as a file."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", name) is None:
        raise TrainingError(f"{name!r} is not an expert id; give one of letters, digits and . _ : - with --id")
