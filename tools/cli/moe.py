"""`coserve moe …`: prepare, check and measure language models whose experts stay on disk.

Each command imports torch and transformers when it runs, not when `coserve` starts.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from experts.moe.modes import FITS, load_registered
from tools.terminal.console import AsJson, fail, print_json, print_table
from tools.terminal.option_values import Commands, must_be_one_of

Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder in Hugging Face format.")]
Traced = Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint's folder with its traces.")]

moe_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Language models whose experts stay on disk.")


@moe_app.command("import")
def import_model(
    folder: Annotated[Path, typer.Argument(help="A checkpoint in Hugging Face format.", show_default=False)],
    storage: Annotated[Literal["exact", "int8", "int4"], typer.Option(help="How experts are stored.")] = "exact",
    *,
    as_json: AsJson = False,
) -> None:
    """Check a checkpoint, and write its experts in slot layout into its folder `coserve/`.

    Missing, extra, mis-shaped or truncated tensors and unknown architectures are refused by name. int8 and int4
    lose accuracy, and the command says how much.

    Example: coserve moe import models/mixtral --storage int8
    """
    from tools.moe.checkpoint import import_checkpoint

    report = import_checkpoint(folder, storage)
    if as_json:
        print_json(report)
    else:
        print_table(f"experts of {folder}", ("", ""), list(report.items()))


@moe_app.command()
def trace(
    checkpoint: Checkpoint,
    texts: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A folder of text files for each task; without it Python's own manual."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 600,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a prompt.")] = 256,
) -> None:
    """Run text through the model with all experts in memory, and record the experts of each token.

    Existing traces are not taken again.

    Example: coserve moe trace models/olmoe --texts texts
    """
    from tools.moe.trace import trace_text

    taken = trace_text(checkpoint, texts, prompts, length)
    row = (", ".join(taken.tasks), taken.prompts, len(taken.token), taken.layers, taken.experts)
    print_table(f"trace of {checkpoint}", ("tasks", "prompts", "tokens", "layers", "experts"), [row])


@moe_app.command()
def fit(
    model: Traced,
    mode: Annotated[str, typer.Option(help=f"Train the predictor of {', '.join(FITS)}, or all.")] = "all",
) -> None:
    """Train the predictors that modes need, after `coserve moe trace`.

    A stopped run resumes with the first layer that is missing; predictors made from the same trace stay.

    Example: coserve moe fit models/olmoe --mode duoserve
    """
    must_be_one_of("--mode", mode, (*FITS, "all"))
    from experts.moe.weights.prepared import PreparedFiles
    from tools.moe.checkpoint import progress_bars
    from tools.moe.trace import training_windows

    prepared = PreparedFiles(model)
    for name in FITS if mode == "all" else [mode]:
        with progress_bars() as progress:
            load_registered(FITS[name])(prepared, partial(training_windows, prepared), progress)


@moe_app.command()
def unite(
    model: Traced,
    way: Annotated[
        list[int] | None, typer.Option(help="Experts united in one: 2, 4 or 8. Repeat; default all.")
    ] = None,
) -> None:
    """Distil united experts on activations of the training files, after `coserve moe trace`.

    A stopped run resumes with the first layer that is missing; united experts made in the same way stay.

    Example: coserve moe unite models/olmoe --way 4
    """
    from experts.moe.modes.brownout.united import WAYS, DistillRecipe
    from tools.moe.unite import unite_all

    ways = tuple(dict.fromkeys(way or WAYS))
    if unknown := [name for name in ways if name not in WAYS]:
        fail(f"--way {unknown[0]}: expected one of {', '.join(map(str, WAYS))}", status=2)
    rows = unite_all(model, ways, DistillRecipe())
    title = "united experts, and their error as a share of the energy of the replaced experts' answers"
    print_table(title, ("way", "of a layer", "MB", "error"), rows)


@moe_app.command()
def plan(
    checkpoint: Checkpoint,
    budget: Annotated[str, typer.Option(help="Memory for experts: `600MiB`, or a part of all of them: `50%`.")] = "50%",
    configurations: Annotated[int, typer.Option(min=8, help="Random ones to measure.")] = 40,
) -> None:
    """Divide a memory budget among a model's layers, and say how often experts are swapped (mode swapmoe).

    A stopped run resumes with the configuration it was at. An existing plan for this budget is made again from the
    saved measurements.

    Example: coserve moe plan models/olmoe --budget 50%
    """
    from tools.moe.plan import Planner, PlanProfile

    planner = Planner(checkpoint, budget, PlanProfile())
    plan = planner.run(configurations)
    splits = {"even split": planner.even, "planned": plan.counts}
    measured = {name: planner.measured(counts, plan.period) for name, counts in splits.items()}
    rows = [
        (name, " ".join(map(str, each.counts)), f"{each.loss:.4f}", f"{each.loads:.2f}")
        for name, each in measured.items()
    ]
    title = f"{checkpoint}, {plan.budget_bytes} bytes, an update cycle of {plan.period} steps"
    print_table(title, ("plan", "virtual experts of each layer", "nats per token", "loads per step"), rows)
