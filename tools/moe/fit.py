"""`coserve moe fit`: train the predictors of modes on routing traces of the training files."""

from pathlib import Path
from typing import Annotated

import typer

from experts.moe.modes import MODES, load_registered
from tools.terminal.option_values import must_be_one_of

_FITTED = [name for name, entry in MODES.items() if entry.fit]


def fit(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint's folder with its traces.")],
    mode: Annotated[str, typer.Option(help=f"Train the predictor of {', '.join(_FITTED)}, or all.")] = "all",
) -> None:
    """Train the predictors that modes need, after `coserve moe trace`.

    A stopped run resumes with the first layer that is missing; predictors made from the same trace stay.

    Example: coserve moe fit models/olmoe --mode duoserve
    """
    must_be_one_of("--mode", mode, (*_FITTED, "all"))
    from experts.moe.model.mode import FitFunction, FitInputs
    from experts.moe.weights.prepared import PreparedFiles
    from tools.moe.progress import progress_bars
    from tools.moe.text import TRAIN, load_text

    prepared = PreparedFiles(model)

    def training_windows(length: int, count: int):
        text = load_text(prepared, TRAIN)
        return {task: text.windows(task, length, count) for task in text.ids}

    for name in _FITTED if mode == "all" else [mode]:
        run: FitFunction = load_registered(MODES[name].fit or "")
        with progress_bars() as progress:
            run(FitInputs(prepared, training_windows, progress))
