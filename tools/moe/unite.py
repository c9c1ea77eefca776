"""`coserve moe unite`: distil united experts, with which the mode `brownout` answers under load."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tools.terminal.console import fail, print_table

if TYPE_CHECKING:
    from experts.moe.model.mode import FitProgress
    from experts.moe.model.runtime import MoeRuntime
    from experts.moe.modes.brownout.united import Activations, Distillation, DistillRecipe
    from experts.moe.weights.prepared import PreparedFiles


def unite(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint's folder with its traces.")],
    way: Annotated[
        list[int] | None, typer.Option(help="Experts united in one: 2, 4 or 8. Repeat; default all.")
    ] = None,
) -> None:
    """Distil united experts on activations of the training files, after `coserve moe trace`.

    A stopped run resumes with the first layer that is missing; united experts made in the same way stay.

    Example: coserve moe unite models/olmoe --way 4
    """
    from experts.moe.modes.brownout.united import WAYS, DistillRecipe

    ways = tuple(dict.fromkeys(way or WAYS))
    if unknown := [name for name in ways if name not in WAYS]:
        fail(f"--way {unknown[0]}: expected one of {', '.join(map(str, WAYS))}", status=2)
    rows = unite_all(model, ways, DistillRecipe())
    print_table(
        "united experts, and their error as a share of the energy of the replaced experts' answers",
        ("way", "of a layer", "MB", "distilled", "averaged"),
        rows,
    )


def unite_all(checkpoint: Path, ways: tuple[int, ...], recipe: "DistillRecipe") -> list[tuple[str, ...]]:
    """Distil what is missing; return a row of the report for each way."""
    from experts.moe.modes.brownout.united import Distillation, load_united
    from experts.moe.weights.prepared import PreparedFiles
    from tools.moe.checkpoint import open_runtime

    prepared = PreparedFiles(checkpoint)
    with closing(open_runtime(checkpoint, "ondemand", share=0.25)) as runtime:
        jobs = [Distillation(prepared, runtime.store, way, recipe) for way in ways]
        todo = [job for job in jobs if not job.is_done()]
        if todo:
            _make(runtime, prepared, todo, recipe)
    rows: list[tuple[str, ...]] = []
    for way in ways:
        united = load_united(prepared, way)
        distilled, averaged = prepared.load(f"united-{way}")[1]["missed"]
        size = f"{united.weights_bytes / 1e6:.2f}"
        rows.append((str(way), str(len(united.down[0])), size, f"{distilled:.3f}", f"{averaged:.3f}"))
    return rows


def _make(
    runtime: "MoeRuntime", prepared: "PreparedFiles", jobs: "list[Distillation]", recipe: "DistillRecipe"
) -> None:
    from experts.moe.modes.brownout.united import Activations
    from tools.moe.progress import progress_bars

    steps = [(job, layer) for job in jobs for layer in job.missing()]
    with progress_bars() as progress:
        activations = Activations(runtime.arch.layers, recipe.tokens)
        if steps:
            _collect(runtime, prepared, activations, progress)
        for number, (job, layer) in enumerate(steps, 1):
            activation = runtime.model.get_submodule(runtime.arch.blocks[layer]).experts.act_fn
            job.make(layer, activations.of(layer), activation)
            progress("united experts", number, len(steps), f", way {job.way}, layer {layer + 1}")
        for job in jobs:
            job.finish()


def _collect(
    runtime: "MoeRuntime", prepared: "PreparedFiles", activations: "Activations", progress: "FitProgress"
) -> None:
    """Run evenly chosen prompts of the training trace through the model, until there are enough activations."""
    import torch

    from experts.moe.trace import load_trace
    from experts.moe.weights.prepared import TRAIN

    trace = load_trace(prepared, TRAIN)
    prompt_count = min(trace.prompts, -(-activations.tokens * trace.prompts // max(1, len(trace.token))))
    prompts = torch.linspace(0, trace.prompts - 1, prompt_count).int().tolist()
    runtime.observers.append(activations.observe)
    with torch.no_grad():
        for number, prompt in enumerate(prompts, 1):
            runtime.model(trace.token[trace.span(prompt)].long()[None], use_cache=False)
            progress("activations", number, prompt_count)
