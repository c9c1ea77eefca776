"""All modes of serving by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from experts.moe.errors import ModelError
from experts.moe.model.mode import BaseMode, Gate, Mode
from experts.moe.modes.brownout.mode import Brownout
from experts.moe.modes.duoserve.mode import DuoServe
from experts.moe.modes.emoe.mode import Emoe
from experts.moe.modes.lookahead import Lookahead
from experts.moe.modes.ondemand import OnDemand
from experts.moe.modes.popularity import Popularity
from experts.moe.modes.prune import Prune
from experts.moe.modes.resident import Resident
from experts.moe.modes.swapmoe.mode import SwapMoe

__all__ = ["MODES", "BaseMode", "Gate", "Mode", "ModeEntry", "open_mode"]


@dataclass(frozen=True, slots=True)
class ModeEntry:
    """`make(checkpoint, options)` gives a mode and raises ModelError where a part is missing that must be prepared.

    `options` are all that there are; None where `make` looks at them itself.
    """

    make: Callable[[Path, Mapping[str, Any]], Mode]
    options: tuple[str, ...] | None = None


MODES: dict[str, ModeEntry] = {
    "resident": ModeEntry(lambda _, __: Resident(), ()),
    "ondemand": ModeEntry(lambda _, __: OnDemand(), ()),
    "lookahead": ModeEntry(lambda _, __: Lookahead(), ()),
    "popularity": ModeEntry(Popularity.open, ()),
    "prune": ModeEntry(Prune.open, ()),
    "duoserve": ModeEntry(DuoServe.open, ("overlap",)),
    "brownout": ModeEntry(Brownout.open),
    "swapmoe": ModeEntry(SwapMoe.open),
    "emoe": ModeEntry(Emoe.open, ("period", "variant", "task_aware")),
}


def open_mode(name: str, checkpoint: Path, options: Mapping[str, Any] | None = None) -> Mode:
    """A mode by its name. Raises ModelError where there is no such mode, or it lacks what must be prepared."""
    entry = MODES.get(name)
    if entry is None:
        near = get_close_matches(name, MODES, n=1)
        meant = f"; did you mean {near[0]}?" if near else "."
        raise ModelError(checkpoint, f"there is no mode {name!r}{meant} Modes are: {', '.join(MODES)}")
    given = options or {}
    for option in given:
        if entry.options is not None and option not in entry.options:
            known = f"options are: {', '.join(entry.options)}" if entry.options else "it has none"
            raise ModelError(checkpoint, f"mode {name} has no option {option!r}; {known}")
    return entry.make(checkpoint, given)
