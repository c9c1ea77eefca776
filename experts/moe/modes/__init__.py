"""The registry of modes by name. Importing it imports neither torch nor transformers.

To add a mode, write its file or folder here and add its line to `MODES`. Baselines share `baselines.py`; the modes of
papers have a folder each.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from experts.moe.errors import ModelError

if TYPE_CHECKING:
    from experts.moe.model.mode import Mode


#: Each mode's subclass of `Mode` as `module:Class`, the module relative to this package.
MODES = {
    "resident": "baselines:Resident",
    "ondemand": "baselines:OnDemand",
    "lookahead": "baselines:Lookahead",
    "popularity": "baselines:Popularity",
    "prune": "baselines:Prune",
    "duoserve": "duoserve.mode:DuoServe",
    "swapmoe": "swapmoe.mode:SwapMoe",
    "emoe": "emoe.mode:Emoe",
    "brownout": "brownout.mode:Brownout",
}
#: What `coserve moe fit` calls for a mode with PreparedFiles, TrainingWindows and FitProgress (model/mode.py). It saves
#: what it trains. A stopped fit resumes; a finished one is not repeated.
FITS = {"duoserve": "duoserve.predictor:fit", "emoe": "emoe.fitting:fit"}


def load_registered(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)


def open_mode(name: str, checkpoint: Path, options: Mapping[str, Any] | None = None) -> "Mode":
    """Raises ModelError for an unknown mode or option, or if a prepared file is missing."""
    if name not in MODES:
        near = get_close_matches(name, MODES, n=1)
        suggestion = f"; did you mean {near[0]}?" if near else "."
        raise ModelError(checkpoint, f"there is no mode {name!r}{suggestion} Modes are: {', '.join(MODES)}")
    mode: type[Mode] = load_registered(MODES[name])
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
