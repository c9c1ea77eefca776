"""Training the predictors on a trace, one layer after the other, and keeping them beside the checkpoint."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from experts.moe.errors import ModelError
from experts.moe.modes.duoserve.predictor import KEPT, WIDTHS, ExpertMLP, Predictor
from experts.moe.modes.duoserve.state import LEAD, Paths, StateConstructor, StateShape, known
from experts.moe.statistics import affinity, popularity
from experts.moe.trace import Trace
from experts.moe.weights.prepared import PreparedFiles


@dataclass(frozen=True, slots=True)
class DuoServeRecipe:
    """How each layer's predictor is trained; kept beside it, and compared."""

    widths: tuple[int, ...] = WIDTHS
    #: Tokens seen in all, the trace's as often as that takes, and tokens of a step.
    tokens: int = 300_000
    batch: int = 1024
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    seed: int = 4


#: Steps done, steps in all, the loss now.
Progress = Callable[[int, int, float], None]


def part_name(layer: int) -> str:
    """The prepared file of the predictor for `layer`."""
    return f"duoserve/layer-{layer}"


def states_of(trace: Trace, layer: int) -> StateConstructor:
    """Builds states of `layer` with what the trace says of it by counting."""
    shape = StateShape(trace.layers, trace.experts, trace.index.shape[2])
    return StateConstructor(shape, layer, popularity(trace)[layer], affinity(trace, known(layer) - 1, layer))


def paths_of(trace: Trace) -> tuple[Paths, Paths]:
    """Of each token its own path, and that of the token before it: the sentinel for the first of a prompt."""
    own = Paths(trace.index.long(), trace.weight.float())
    before = Paths(own.index.roll(1, 0), own.weight.roll(1, 0))
    before.index[trace.start[:-1]] = trace.experts
    before.weight[trace.start[:-1]] = 0.0
    return own, before


def is_fitted(prepared: PreparedFiles, layer: int, trace: Trace, recipe: DuoServeRecipe) -> bool:
    """Whether this layer's predictor is there and was trained on as much in the same way."""
    return prepared.has(part_name(layer)) and prepared.load(part_name(layer))[1]["made"] == _made(trace, recipe)


def fit_layer(trace: Trace, layer: int, recipe: DuoServeRecipe, progress: Progress) -> ExpertMLP:
    """A predictor of `layer`, 1 or above, from the layers before it. The same trace and seed make the same network."""
    states = states_of(trace, layer)
    sofar, before = paths_of(trace)
    sofar = sofar.first(known(layer))
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
        for step, rows in enumerate(islice(_batches(len(trace.index), recipe.batch, generator), steps)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=_bfloat16_is_fast()):
                logits = network(states.build(sofar.rows(rows), before.rows(rows)))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), truth[rows])
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            schedule.step()
            progress(step + 1, steps, loss.item())
    return network.eval()


def save_layer(prepared: PreparedFiles, layer: int, network: ExpertMLP, trace: Trace, recipe: DuoServeRecipe) -> None:
    """Keep what `load_predictors` needs: the folded network in the precision in which it is asked."""
    states = states_of(trace, layer)
    tensors = {"popularity": states.popularity, "affinity": states.affinity}
    for number, (weight, bias) in enumerate(network.folded()):
        tensors |= {f"{number}.weight": weight.to(KEPT), f"{number}.bias": bias.to(KEPT)}
    prepared.save(part_name(layer), tensors, {"made": _made(trace, recipe), "shape": asdict(states.shape)})


def load_predictors(prepared: PreparedFiles) -> dict[int, Predictor]:
    """All predictors by the layer that they predict. Raises ModelError where one is missing, broken or not of this."""
    first = _load(prepared, 1)
    return {1: first} | {layer: _load(prepared, layer) for layer in range(2, first.shape.layers)}


def _load(prepared: PreparedFiles, layer: int) -> Predictor:
    tensors, notes = prepared.load(part_name(layer))
    try:
        states = StateConstructor(StateShape(**notes["shape"]), layer, tensors["popularity"], tensors["affinity"])
        count = sum(name.endswith(".weight") for name in tensors)
        return Predictor.of(states, [(tensors[f"{one}.weight"], tensors[f"{one}.bias"]) for one in range(count)])
    except (KeyError, TypeError) as error:
        message = f"is no predictor ({error}); make it again with `coserve moe fit {prepared.checkpoint}`"
        raise ModelError(prepared.path(part_name(layer)), message) from error


def _batches(tokens: int, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """(batch,) int64 rows of a trace without end, each row once before any comes again."""
    while True:
        order = torch.randperm(tokens, generator=generator)
        # Rows that fill no batch wait for another order: a norm over a single row has no variance.
        yield from order[: max(1, tokens // batch) * batch].split(batch)


def _bfloat16_is_fast() -> bool:
    """Whether the CPU multiplies matrices of bfloat16 in hardware: then training takes 2.4 times less time."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _made(trace: Trace, recipe: DuoServeRecipe) -> dict[str, Any]:
    """From what and how: what is there is trained again when any of it differs."""
    made = {"trace": [len(trace.index), trace.prompts], "lead": LEAD}
    return made | asdict(recipe) | {"widths": list(recipe.widths)}
