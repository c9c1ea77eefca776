"""`coserve moe unite`: distil united experts, which the mode `brownout` answers with under load."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tools.cli.console import console, fail, print_table

if TYPE_CHECKING:
    from rich.progress import Progress

    from experts.moe.model.runtime import MoeRuntime
    from experts.moe.modes.brownout.united import Activation, Activations, Distillation, DistillRecipe
    from experts.moe.weights.prepared import PreparedFiles


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command()(unite)


def unite(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint's folder with its traces.")],
    way: Annotated[
        list[int] | None, typer.Option(help="Experts united in one: 2, 4 or 8. Repeat; default all.")
    ] = None,
) -> None:
    """Distil united experts on activations of the training files, after `coserve moe trace`.

    Stopped, it goes on with the first layer that is missing; what is there and was made in the same way stays.

    Example: coserve moe unite build/moe/fixture --way 4
    """
    from experts.moe.modes.brownout.united import WAYS, DistillRecipe

    ways = tuple(dict.fromkeys(way or WAYS))
    for each in ways:
        if each not in WAYS:
            fail(f"--way {each}: expected one of {', '.join(map(str, WAYS))}", status=2)
    rows = unite_all(model, ways, DistillRecipe())
    print_table(
        "united experts, and what they miss of the answers of those they stand in for (share of the energy)",
        ("way", "of a layer", "MB", "distilled", "averaged"),
        rows,
    )


def unite_all(checkpoint: Path, ways: tuple[int, ...], recipe: "DistillRecipe") -> list[tuple[str, ...]]:
    """Make what is missing; a row of the report for each way."""
    from experts.moe.modes.brownout.united import Distillation, load_united
    from experts.moe.weights.prepared import PreparedFiles
    from tools.moe.evaluate import open_runtime

    prepared = PreparedFiles(checkpoint)
    runtime = open_runtime(checkpoint, "ondemand", share=0.25)
    try:
        jobs = [Distillation(prepared, runtime.store, way, recipe) for way in ways]
        todo = [job for job in jobs if not job.is_done()]
        if todo:
            _make(runtime, prepared, todo, recipe)
    finally:
        runtime.close()
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
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from experts.moe.modes.brownout.united import Activations
    from tools.cli.progress import Bars

    steps = [(job, layer) for job in jobs for layer in job.missing()]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console) as progress:
        activations = Activations(runtime.arch.layers, recipe.tokens)
        if steps:
            _collect(runtime, prepared, activations, progress)
        bar = progress.add_task("", total=len(steps))
        for job, layer in steps:
            progress.update(bar, description=f"way {job.way}, layer {layer + 1} of {runtime.arch.layers}")
            job.make(layer, activations.of(layer), _activation(runtime, layer))
            progress.advance(bar)
        for job in jobs:
            job.finish()


def _collect(
    runtime: "MoeRuntime", prepared: "PreparedFiles", activations: "Activations", progress: "Progress"
) -> None:
    """Run prompts of the training trace through the model, evenly chosen, as many as activations are kept of."""
    import torch

    from experts.moe.trace import load_trace
    from experts.moe.weights.prepared import TRAIN

    trace = load_trace(prepared, TRAIN)
    wanted = min(trace.prompts, -(-activations.tokens * trace.prompts // max(1, len(trace.token))))
    prompts = [
        trace.token[trace.span(each)].long() for each in torch.linspace(0, trace.prompts - 1, wanted).int().tolist()
    ]
    runtime.observers.append(activations.observe)
    try:
        with torch.no_grad():
            for prompt in progress.track(prompts, description="activations"):
                ids = prompt[None]
                given = {"decoder_input_ids": ids} if runtime.arch.encoder_layers else {}
                runtime.model(ids, use_cache=False, **given)
    finally:
        runtime.observers.remove(activations.observe)


def _activation(runtime: "MoeRuntime", layer: int) -> "Activation":
    """The function between an expert's two matrices."""
    experts = runtime.model.get_submodule(runtime.arch.blocks[layer]).experts
    return experts.act if runtime.arch.encoder_layers else experts.act_fn
