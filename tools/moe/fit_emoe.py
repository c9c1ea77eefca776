"""The part of `coserve moe fit` for eMoE: its predictor of experts, and where each task is sensitive to wrong ones."""

from typing import TYPE_CHECKING

from tools.cli.console import console, print_table

if TYPE_CHECKING:
    from experts.moe.modes.emoe.sensitivity import Shares
    from experts.moe.weights.prepared import PreparedFiles

#: Training text that the sensitivity of each task is measured on.
_WINDOWS, _LENGTH = 24, 256


def fit_emoe(prepared: "PreparedFiles") -> None:
    """The predictor from the training trace, then sensitivity on training text; prints what both came to."""
    from experts.moe.modes.emoe.fitting import PART, EmoeRecipe, fit_predictor, is_fitted, save_predictor
    from experts.moe.trace import load_trace
    from experts.moe.weights.prepared import HELD_OUT, TRAIN

    trace, recipe = load_trace(prepared, TRAIN), EmoeRecipe()
    with _progress() as progress:
        if is_fitted(prepared, trace, recipe):
            progress.add_task(f"{PART}, there already", total=1, completed=1)
        else:
            bar = progress.add_task(PART, total=recipe.steps)
            predictor = fit_predictor(
                trace,
                recipe,
                lambda step, loss: progress.update(bar, completed=step, description=f"{PART}, loss {loss:.3f}"),
            )
            save_predictor(prepared, predictor, trace, recipe)
    shares = measure_sensitivity(prepared)
    _show(shares)
    if prepared.has(HELD_OUT):
        _show_recall(prepared)


def measure_sensitivity(prepared: "PreparedFiles") -> "Shares":
    """What share of its accuracy each task keeps under wrong routing, on training files."""
    from experts.moe.model.runtime import MoeRuntime
    from experts.moe.modes.emoe.measuring import WrongRouting, measure
    from experts.moe.modes.emoe.sensitivity import PART
    from tools.moe.evaluate import budget_of
    from tools.moe.text import TRAIN, load_text

    text = load_text(prepared, TRAIN)
    windows = {task: text.windows(task, _LENGTH, _WINDOWS) for task in text.ids}
    mode = WrongRouting()
    runtime = MoeRuntime.open(prepared.checkpoint, mode, budget_of(prepared.checkpoint, 1.0))
    try:
        with _progress() as progress:
            bar = progress.add_task(PART, total=None)
            return measure(
                runtime, mode, windows, prepared, lambda done, every: progress.update(bar, completed=done, total=every)
            )
    finally:
        runtime.close()


def _progress():
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from tools.cli.progress import Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Bars(*columns, console=console)


def _show(shares: "Shares") -> None:
    from experts.moe.modes.emoe.sensitivity import THRESHOLD, sensitive

    matters = sensitive(shares)
    layers = len(next(iter(shares.values())))
    rows = [
        (task, *(f"{share:.2f}{'' if wrong else ' *'}" for share, wrong in zip(row, matters[task], strict=True)))
        for task, row in shares.items()
    ]
    title = f"accuracy kept with this layer and all that bear more routed wrongly (* insensitive: {THRESHOLD} or more)"
    print_table(title, ("task", *map(str, range(layers))), rows)


def _show_recall(prepared: "PreparedFiles") -> None:
    """How much of held-out prompts' routing falls on half of the experts, by who names them."""
    from experts.moe.modes.emoe.fitting import load_predictor
    from experts.moe.modes.emoe.recall import recalls
    from experts.moe.trace import load_trace
    from experts.moe.weights.prepared import HELD_OUT

    predictor, _ = load_predictor(prepared)
    trace = load_trace(prepared, HELD_OUT)
    periods = (1, 5, 20)
    found = [recalls(predictor, trace, period, trace.experts // 2) for period in periods]
    rows = [(name, *(f"{one[name]:.3f}" for one in found)) for name in found[0]]
    title = "share of held-out prompts' tokens whose experts are among half of each layer's"
    print_table(title, ("named by", *(f"every {period} prompts" for period in periods)), rows)
