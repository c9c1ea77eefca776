"""Makes experts: trains on the user's images, imports networks, and proves that a file answers as its source.

Import `classifier` and `detector` (training commands), `fit` (parts of classifier training), `importer` and
`expert_file` (every expert is written there), `held_out` and `proof` (measures). Nothing here runs in the daemon.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from experts.spec import Task
from experts.vision.architectures import ARCHITECTURES, Architecture
from tools.terminal.console import CommandError
from tools.terminal.names import legal_name


class TrainingError(CommandError):
    """A training or an import cannot start or went wrong; the text names the file or value, and what to do."""


def architecture_of(name: str, *tasks: Task) -> Architecture:
    """Return the architecture of this name, which does one of `tasks`. Raises TrainingError."""
    known = [each.name for each in ARCHITECTURES.values() if each.task in tasks]
    if name not in known:
        raise TrainingError(f"--architecture: expected one of {', '.join(known)}, not {name!r}", status=2)
    return ARCHITECTURES[name]


def require_expert_id(name: str) -> None:
    """Raise TrainingError unless `name` can name an expert in the catalog, in rules and as a file."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", name) is None:
        raise TrainingError(f"{name!r} is not an expert id; give one of letters, digits and . _ : - with --id")


def class_names(named: Any, where: object) -> tuple[str, ...]:
    """Return the names of classes in the network's order, of a data set, a checkpoint or an option.

    They come as a list, by number ({0: "ok"}; keys may be text), or as numbers by name, as torchvision's class_to_idx.
    Raises CommandError, whose text begins with `where` and names the class.
    """
    if isinstance(named, Mapping):
        is_inverted = all(type(number) is int for number in named.values())
        by_number = {str(b if is_inverted else a): a if is_inverted else b for a, b in named.items()}
        numbers = [str(number) for number in range(len(named))]
        named = [by_number[number] for number in numbers] if by_number.keys() == {*numbers} else []
    if not isinstance(named, Sequence) or isinstance(named, str) or not named:
        raise TrainingError(f"{where}: expected a list of class names, or their numbers from 0 without gaps as keys")
    names: list[str] = []
    for number, name in enumerate(named):
        if not isinstance(name, str):
            raise TrainingError(f"{where}: class {number} is {name!r}, not text (unquoted YAML reads NO as False)")
        names.append(legal_name(name, f"{where}: class {number}"))
        if names[-1] in names[:-1]:
            first = names.index(names[-1])
            raise TrainingError(f"{where}: classes {first} and {number} are both {names[-1]}, expected different names")
    return tuple(names)
