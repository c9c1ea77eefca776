"""The registry of modes by name. Importing it imports neither torch nor transformers.

To add a mode, write its file or folder here and add its line to `MODES`. Baselines share `baselines.py`; the modes of
papers have a folder each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from experts.moe.errors import ModelError

if TYPE_CHECKING:
    from experts.moe.model.mode import Mode


@dataclass(frozen=True, slots=True)
class ModeEntry:
    """`mode` names a subclass of `Mode` as `module:Class`, the module relative to this package.

    `fit` names a `FitFunction` (model/mode.py) of a mode that `coserve moe fit` prepares.
    """

    mode: str
    fit: str | None = None


MODES: dict[str, ModeEntry] = {
    "resident": ModeEntry("baselines:Resident"),
    "ondemand": ModeEntry("baselines:OnDemand"),
    "lookahead": ModeEntry("baselines:Lookahead"),
    "popularity": ModeEntry("baselines:Popularity"),
    "prune": ModeEntry("baselines:Prune"),
    "duoserve": ModeEntry("duoserve.mode:DuoServe", fit="duoserve.predictor:fit"),
    "swapmoe": ModeEntry("swapmoe.mode:SwapMoe"),
    "emoe": ModeEntry("emoe.mode:Emoe", fit="emoe.fitting:fit"),
    "brownout": ModeEntry("brownout.mode:Brownout"),
}


def load_registered(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)


def open_mode(name: str, checkpoint: Path, options: Mapping[str, Any] | None = None) -> "Mode":
    """Raises ModelError for an unknown mode or option, or if a prepared file is missing."""
    entry = MODES.get(name)
    if entry is None:
        near = get_close_matches(name, MODES, n=1)
        suggestion = f"; did you mean {near[0]}?" if near else "."
        raise ModelError(checkpoint, f"there is no mode {name!r}{suggestion} Modes are: {', '.join(MODES)}")
    mode: type[Mode] = load_registered(entry.mode)
    try:
        validated = mode.Options.model_validate(dict(options or {}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = ".".join(str(part) for part in first["loc"])
        options_text = ", ".join(mode.Options.model_fields)
        options_text = f"options are: {options_text}" if options_text else "it has no options"
        where = f"mode {name}, option {option}" if option else f"mode {name}"
        raise ModelError(checkpoint, f"{where}: {first['msg']}; {options_text}") from error
    return mode.open(checkpoint, validated)
