"""Keys of `coserve.yaml` that have another name now: the old name is understood for a time, and a warning says the new.

A key is renamed by a line in `RENAMED`, never by its removal alone: whoever upgrades with an old file must not find
the line stopped, and must not find a setting ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from routing_rules.load import Document, KeyPath, Problem

#: The old place of a key and the new one, both from the top of the file. None was renamed since 0.1.0.
RENAMED: Mapping[KeyPath, KeyPath] = {}


def understand_old_names(document: Document, renamed: Mapping[KeyPath, KeyPath]) -> tuple[list[str], list[Problem]]:
    """Move what stands under old names to the new ones, in `document`; a warning for each, and what stands twice."""
    warnings: list[str] = []
    problems: list[Problem] = []
    for old, new in renamed.items():
        if not _holds(document.data, old):
            continue
        if _holds(document.data, new):
            message = f"`{_text(old)}` is now called `{_text(new)}`, which is there too: take `{_text(old)}` out"
            problems.append(document.problem(old, message, key=True))
            continue
        warnings.append(str(document.problem(old, f"`{_text(old)}` is now called `{_text(new)}`: rename it", key=True)))
        _move(document, old, new)
    return warnings, problems


def new_name_of(suffix: str, renamed: Mapping[KeyPath, KeyPath]) -> KeyPath | None:
    """Where the setting of a variable COSERVE_`suffix` lies now; None where it was not renamed."""
    flat = suffix.replace("__", "_").lower()
    return next((new for old, new in renamed.items() if "_".join(map(str, old)) == flat), None)


def _move(document: Document, old: KeyPath, new: KeyPath) -> None:
    """The value, and the place in the file that mistakes in it are reported at."""
    value = _parent(document.data, old).pop(old[-1])
    data: Any = document.data
    place, target = document.root, document.root
    for part in old[:-1]:
        place = place.children[part][2]
    moved = place.children.pop(old[-1])
    for part in new[:-1]:
        data = data.setdefault(part, {})
        target = target.children.setdefault(part, moved)[2]
    data[new[-1]] = value
    target.children[new[-1]] = moved


def _holds(data: Any, path: KeyPath) -> bool:
    parent = _parent(data, path)
    return isinstance(parent, dict) and path[-1] in parent


def _parent(data: Any, path: Sequence[str | int]) -> Any:
    for part in path[:-1]:
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _text(path: KeyPath) -> str:
    return ".".join(map(str, path))
