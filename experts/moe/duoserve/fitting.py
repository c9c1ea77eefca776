"""Training the predictors on a trace, one layer after the other, and keeping them beside the checkpoint."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from experts.moe.duoserve.predictor import WIDTHS, ExpertMLP, Predictor
from experts.moe.duoserve.state import StateConstructor, StateShape
from experts.moe.errors import ModelError
from experts.moe.prepared import Prepared
from experts.moe.statistics import affinity, popularity
from experts.moe.trace import Trace


@dataclass(frozen=True, slots=True)
class Recipe:
    """How each layer's predictor is trained; kept beside it, and compared."""

    widths: tuple[int, ...] = WIDTHS
    #: Passes over the trace's tokens, and tokens of a step.
    epochs: int = 4
    batch: int = 512
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    seed: int = 4


#: Steps done, steps in all, the loss now.
Progress = Callable[[int, int, float], None]


def part_name(layer: int) -> str:
    """The prepared file of the predictor for `layer`."""
    return f"duoserve/layer-{layer}"


def shape_of(trace: Trace) -> StateShape:
    return StateShape(trace.layers, trace.experts, trace.index.shape[2])


def is_fitted(prepared: Prepared, layer: int, trace: Trace, recipe: Recipe) -> bool:
    """Whether this layer's predictor is there and was trained on as much in the same way."""
    return prepared.has(part_name(layer)) and prepared.load(part_name(layer))[1]["made"] == _made(trace, recipe)


def fit_layer(trace: Trace, layer: int, recipe: Recipe, progress: Progress) -> ExpertMLP:
    """A predictor of `layer`, 1 or above, from the layers before it. The same trace and seed make the same network."""
    states = StateConstructor(shape_of(trace), popularity(trace)[layer], affinity(trace)[layer - 1])
    index, weight = trace.index[:, :layer].long(), trace.weight[:, :layer].float()
    truth = torch.zeros(len(index), trace.experts).scatter_(1, trace.index[:, layer].long(), 1.0)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000 + layer)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed * 1_000 + layer)
        network = ExpertMLP(states.shape.size, trace.experts, recipe.widths).train()
        in_epoch = max(1, len(index) // recipe.batch)
        steps = recipe.epochs * in_epoch
        optimiser = torch.optim.AdamW(network.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, recipe.learning_rate, total_steps=steps, pct_start=0.15, cycle_momentum=False
        )
        for epoch in range(recipe.epochs):
            order = torch.randperm(len(index), generator=generator)
            # The last rows that fill no batch wait for another epoch's order: a norm over one row has no variance.
            for step, rows in enumerate(order[: in_epoch * recipe.batch].split(recipe.batch)):
                logits = network(states.build(index[rows], weight[rows]))
                loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, truth[rows])
                loss.backward()
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
                schedule.step()
                progress(epoch * in_epoch + step + 1, steps, loss.item())
    return network.eval()


def save_layer(prepared: Prepared, layer: int, network: ExpertMLP, trace: Trace, recipe: Recipe) -> None:
    """Keep what `load_predictors` needs: the folded network in the precision in which it is asked."""
    tensors = {"popularity": popularity(trace)[layer], "affinity": affinity(trace)[layer - 1]}
    for number, (weight, bias) in enumerate(network.folded()):
        tensors |= {f"{number}.weight": weight, f"{number}.bias": bias}
    shape = asdict(shape_of(trace))
    prepared.save(part_name(layer), tensors, {"made": _made(trace, recipe), "shape": shape})


def load_predictors(prepared: Prepared) -> dict[int, Predictor]:
    """All predictors by the layer that they predict. Raises ModelError where one is missing, broken or not of this."""
    first = _load(prepared, 1)
    return {1: first} | {layer: _load(prepared, layer) for layer in range(2, first.shape.layers)}


def predictor_of(network: ExpertMLP, trace: Trace, layer: int) -> Predictor:
    """A network just trained, as it will be when it is loaded."""
    states = StateConstructor(shape_of(trace), popularity(trace)[layer], affinity(trace)[layer - 1])
    return Predictor(states, network.folded())


def _load(prepared: Prepared, layer: int) -> Predictor:
    tensors, notes = prepared.load(part_name(layer))
    try:
        states = StateConstructor(StateShape(**notes["shape"]), tensors["popularity"], tensors["affinity"])
        count = sum(name.endswith(".weight") for name in tensors)
        return Predictor(states, [(tensors[f"{one}.weight"], tensors[f"{one}.bias"]) for one in range(count)])
    except (KeyError, TypeError) as error:
        message = f"is no predictor ({error}); make it again with `coserve moe fit {prepared.checkpoint}`"
        raise ModelError(prepared.path(part_name(layer)), message) from error


def _made(trace: Trace, recipe: Recipe) -> dict[str, Any]:
    """From what and how: what is there is trained again when any of it differs."""
    return {"tokens": len(trace.index), "prompts": trace.prompts, **asdict(recipe), "widths": list(recipe.widths)}
