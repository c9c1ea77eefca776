"""Training DuoServe's predictors on a trace, layer by layer."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from experts.moe.errors import ModelError
from experts.moe.model.mode import FitInputs
from experts.moe.modes.duoserve.predictor import (
    LEAD,
    STORED_DTYPE,
    WIDTHS,
    ExpertMLP,
    LayerPredictor,
    Paths,
    StateConstructor,
    StateShape,
    known_layers,
)
from experts.moe.trace import Trace, affinity, load_trace, popularity
from experts.moe.weights.prepared import TRAIN, PreparedFiles


@dataclass(frozen=True, slots=True)
class DuoServeRecipe:
    """Settings of the training; stored with each predictor, and compared to tell whether to train again."""

    widths: tuple[int, ...] = WIDTHS
    #: Tokens in all, repeating the trace as often as needed, and tokens of a step.
    tokens: int = 300_000
    batch: int = 1024
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    seed: int = 4


def fit(inputs: FitInputs) -> None:
    prepared, recipe = inputs.prepared, DuoServeRecipe()
    trace = load_trace(prepared, TRAIN)
    for layer in range(1, trace.layers):
        part = f"duoserve, layer {layer} of {trace.layers - 1}"
        if prepared.is_made(part_name(layer), _provenance(trace, recipe)):
            inputs.progress(f"{part}, there already", 1, 1)
            continue
        save_layer(prepared, layer, fit_layer(trace, layer, recipe, partial(inputs.progress, part)), trace, recipe)


def part_name(layer: int) -> str:
    return f"duoserve/layer-{layer}"


def states_of(trace: Trace, layer: int) -> StateConstructor:
    """Return the builder of states for `layer`, with the trace's popularity and affinity."""
    shape = StateShape(trace.layers, trace.experts, trace.index.shape[2])
    return StateConstructor(shape, layer, popularity(trace)[layer], affinity(trace, known_layers(layer) - 1, layer))


def paths_of(trace: Trace) -> tuple[Paths, Paths]:
    """Return each token's own path and that of the token before it: the sentinel for the first of a prompt."""
    own = Paths(trace.index.long(), trace.weight.float())
    before = Paths(own.index.roll(1, 0), own.weight.roll(1, 0))
    before.index[trace.start[:-1]] = trace.experts
    before.weight[trace.start[:-1]] = 0.0
    return own, before


def fit_layer(
    trace: Trace, layer: int, recipe: DuoServeRecipe, report: Callable[[int, int, str], None] = lambda *_: None
) -> ExpertMLP:
    """Train a predictor of `layer`, 1 or above, reproducibly; `report` gets steps done, steps in all, a note."""
    states = states_of(trace, layer)
    sofar, before = paths_of(trace)
    sofar = sofar.first(known_layers(layer))
    truth = torch.zeros(len(trace.index), trace.experts).scatter_(1, trace.index[:, layer].long(), 1.0)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000 + layer)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed * 1_000 + layer)
        network = ExpertMLP(states.shape.size, trace.experts, recipe.widths).train()
        steps = max(1, recipe.tokens // recipe.batch)
        optimiser = torch.optim.AdamW(
            network.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, recipe.learning_rate, total_steps=steps, pct_start=0.15, cycle_momentum=False
        )
        # Training is 2.4 times as fast with bfloat16 in hardware.
        is_fast = bool(torch.cpu.get_capabilities().get("amx_bf16"))
        for step, rows in enumerate(islice(_batches(len(trace.index), recipe.batch, generator), steps)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_fast):
                logits = network(states.build(sofar.rows(rows), before.rows(rows)))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), truth[rows])
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            schedule.step()
            report(step + 1, steps, f", loss {loss.item():.3f}")
    return network.eval()


def save_layer(prepared: PreparedFiles, layer: int, network: ExpertMLP, trace: Trace, recipe: DuoServeRecipe) -> None:
    """Save what `load_predictors` needs: the folded network, popularity and affinity."""
    states = states_of(trace, layer)
    tensors = {"popularity": states.popularity, "affinity": states.affinity}
    for number, (weight, bias) in enumerate(network.folded()):
        tensors |= {f"{number}.weight": weight.to(STORED_DTYPE), f"{number}.bias": bias.to(STORED_DTYPE)}
    prepared.save(part_name(layer), tensors, {"made": _provenance(trace, recipe), "shape": asdict(states.shape)})


def load_predictors(prepared: PreparedFiles) -> dict[int, LayerPredictor]:
    """Load all predictors by the layer that they predict. Raises ModelError if one is missing, broken or outdated."""
    first = _load(prepared, 1)
    return {1: first} | {layer: _load(prepared, layer) for layer in range(2, first.shape.layers)}


def _load(prepared: PreparedFiles, layer: int) -> LayerPredictor:
    tensors, notes = prepared.load(part_name(layer))
    try:
        states = StateConstructor(StateShape(**notes["shape"]), layer, tensors["popularity"], tensors["affinity"])
        count = sum(name.endswith(".weight") for name in tensors)
        folded = [(tensors[f"{number}.weight"], tensors[f"{number}.bias"]) for number in range(count)]
        return LayerPredictor.of(states, folded)
    except (KeyError, TypeError) as error:
        message = f"is not a predictor ({error}); make it again with `coserve moe fit {prepared.checkpoint}`"
        raise ModelError(prepared.path(part_name(layer)), message) from error


def _batches(tokens: int, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield (batch,) int64 rows of a trace without end, each row once before any comes again."""
    while True:
        order = torch.randperm(tokens, generator=generator)
        # Rows that fill no batch wait for another order: a norm over a single row has no variance.
        yield from order[: max(1, tokens // batch) * batch].split(batch)


def _provenance(trace: Trace, recipe: DuoServeRecipe) -> dict[str, Any]:
    """Return the origin of a predictor: one of another origin is trained again."""
    origin = {"trace": [len(trace.index), trace.prompts], "lead": LEAD}
    return origin | asdict(recipe) | {"widths": list(recipe.widths)}
