"""`coserve moe fit`: train what a mode predicts with, on routing traces of the training files."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tools.cli.console import console, print_table
from tools.moe.fit_emoe import fit_emoe

if TYPE_CHECKING:
    from rich.progress import TaskID

    from experts.moe.weights.prepared import PreparedFiles


class Fitted(StrEnum):
    """Modes that need a predictor, and all of them."""

    DUOSERVE = "duoserve"
    EMOE = "emoe"
    ALL = "all"


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command()(fit)


def fit(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint's folder with its traces.")],
    mode: Annotated[Fitted, typer.Option(help="Whose predictor to train.")] = Fitted.ALL,
) -> None:
    """Train the predictors that modes need, after `coserve moe trace`.

    Stopped, it goes on with the first layer that is missing; what is there and was made from the same trace stays.

    Example: coserve moe fit build/moe/fixture --mode duoserve
    """
    from experts.moe.weights.prepared import PreparedFiles

    prepared = PreparedFiles(model)
    for name, fit_mode in _FITS.items():
        if mode in {Fitted.ALL, name}:
            fit_mode(prepared)


def fit_duoserve(prepared: "PreparedFiles") -> None:
    """The perceptrons of DuoServe, layer by layer; prints how often they are right on held-out files."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from experts.moe.modes.duoserve.fitting import DuoServeRecipe, fit_layer, is_fitted, save_layer
    from experts.moe.trace import load_trace
    from experts.moe.weights.prepared import TRAIN
    from tools.cli.progress import Bars

    trace, recipe = load_trace(prepared, TRAIN), DuoServeRecipe()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console) as progress:
        for layer in range(1, trace.layers):
            what = f"duoserve, layer {layer} of {trace.layers - 1}"
            if is_fitted(prepared, layer, trace, recipe):
                progress.add_task(f"{what}, there already", total=1, completed=1)
                continue
            bar = progress.add_task(what, total=None)

            def report(done: int, steps: int, loss: float, bar: "TaskID" = bar, what: str = what) -> None:
                progress.update(bar, completed=done, total=steps, description=f"{what}, loss {loss:.3f}")

            save_layer(prepared, layer, fit_layer(trace, layer, recipe, report), trace, recipe)
    _show(prepared)


def _show(prepared: "PreparedFiles") -> None:
    """Predictions on held-out files beside those by counting."""
    from experts.moe.modes.duoserve.accuracy import accuracies
    from experts.moe.modes.duoserve.fitting import load_predictors
    from experts.moe.trace import load_trace
    from experts.moe.weights.prepared import HELD_OUT, TRAIN

    found = accuracies(load_trace(prepared, HELD_OUT), load_trace(prepared, TRAIN), load_predictors(prepared))
    rows = [(how, f"{hits.all_rate:.3f}", f"{hits.any_rate:.3f}", f"{hits.recall:.3f}") for how, hits in found.items()]
    print_table("experts predicted on held-out files", ("by", "all", "at least one", "share"), rows)


_FITS: "dict[str, Callable[[PreparedFiles], None]]" = {"duoserve": fit_duoserve, "emoe": fit_emoe}
