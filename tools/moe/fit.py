"""`coserve moe fit`: train the predictors of modes on routing traces of the training files."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from experts.moe.model.mode import FitFunction, FitInputs
from experts.moe.modes import MODES, load_registered
from experts.moe.weights.prepared import PreparedFiles
from tools.moe.progress import progress_bars
from tools.moe.text import TRAIN, load_text


def fit_predictors(model: Path, modes: Iterable[str]) -> None:
    """Train the predictors of `modes`. Raises ModelError if traces or text are missing."""
    prepared = PreparedFiles(model)

    def training_windows(length: int, count: int) -> Mapping[str, torch.Tensor]:
        text = load_text(prepared, TRAIN)
        return {task: text.windows(task, length, count) for task in text.ids}

    for name in modes:
        run: FitFunction = load_registered(MODES[name].fit or "")
        with progress_bars() as progress:
            run(FitInputs(prepared, training_windows, progress))
