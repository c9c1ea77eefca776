"""`coserve moe unite`: distil united experts, with which the mode `brownout` answers under load."""

from contextlib import closing
from pathlib import Path

import torch

from experts.moe.model.mode import FitProgress
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes.brownout.united import Activations, Distillation, DistillRecipe, load_united
from experts.moe.trace import load_trace
from experts.moe.weights.prepared import TRAIN, PreparedFiles
from tools.moe.checkpoint import open_runtime, progress_bars


def unite_all(checkpoint: Path, ways: tuple[int, ...], recipe: DistillRecipe) -> list[tuple[str, ...]]:
    """Distil what is missing; return a row of the report for each way."""
    prepared = PreparedFiles(checkpoint)
    with closing(open_runtime(checkpoint, "ondemand", share=0.25)) as runtime:
        steps = [
            (job, layer)
            for job in (Distillation(prepared, runtime.store, way, recipe) for way in ways)
            for layer in job.missing()
        ]
        if steps:
            with progress_bars() as progress:
                activations = Activations(runtime.arch.layers, recipe.tokens)
                _collect(runtime, prepared, activations, progress)
                for number, (job, layer) in enumerate(steps, 1):
                    activation = runtime.model.get_submodule(runtime.arch.blocks[layer]).experts.act_fn
                    job.make(layer, activations.of(layer), activation)
                    progress("united experts", number, len(steps), f", way {job.way}, layer {layer + 1}")
    rows: list[tuple[str, ...]] = []
    for way in ways:
        united = load_united(prepared, way)
        rows.append((str(way), str(len(united.down[0])), f"{united.weights_bytes / 1e6:.2f}", f"{united.missed:.3f}"))
    return rows


def _collect(runtime: MoeRuntime, prepared: PreparedFiles, activations: Activations, progress: FitProgress) -> None:
    """Run evenly chosen prompts of the training trace through the model, until there are enough activations."""
    trace = load_trace(prepared, TRAIN)
    prompt_count = min(trace.prompts, -(-activations.tokens * trace.prompts // max(1, len(trace.token))))
    prompts = torch.linspace(0, trace.prompts - 1, prompt_count).int().tolist()
    runtime.observers.append(activations.observe)
    with torch.no_grad():
        for number, prompt in enumerate(prompts, 1):
            runtime.model(trace.token[trace.span(prompt)].long()[None], use_cache=False)
            progress("activations", number, prompt_count)
