"""The predictor of DuoServe-MoE (§4.2): from a token's path so far to the experts of a later layer.

The state is s = [h, p, a]. h: the experts chosen so far, zero-padded to a fixed length. p: popularity of the layer to
be predicted. a: affinity of the layer to the chosen experts. Ours (docs/language-models.md): h has one place for each
expert of each layer, with the gate's weights beside it, instead of the experts' numbers; it includes the path of the
token before; it ends `LEAD` layers before the predicted one, which leaves time to predict and to fetch; and a has only
the rows of the experts chosen last, since the whole matrix is the same for every token of a layer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice, pairwise, zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import fuse_linear_bn_eval

from experts.moe.model.mode import FitProgress, TrainingWindows
from experts.moe.trace import Trace, affinity, load_trace, popularity
from experts.moe.weights.prepared import TRAIN, PreparedFiles

#: Widths of the hidden layers; with the output there are seven fully connected layers.
WIDTHS = (2048, 1024, 512, 256, 128, 64)
_DROPOUT = 0.1
#: From this many weights on, reading only those whose input is not zero saves time.
_SPARSE_WEIGHTS = 500_000
_BIAS = np.zeros(1, np.int64)
#: Type of a trained network's stored weights and of its computation; ranks of experts need no more precision.
STORED_DTYPE = torch.bfloat16
#: A layer is predicted after the gate of the layer `LEAD` before it, or after the first gate. The paper's is 1.
LEAD = 2


@dataclass(frozen=True, slots=True)
class StateShape:
    layers: int
    experts: int
    top_k: int

    @property
    def path(self) -> int:
        """Numbers of one token's path: for each expert of each layer 1 if it was chosen, and its weight."""
        return 2 * self.layers * self.experts

    @property
    def size(self) -> int:
        return 2 * self.path + self.experts + self.top_k * self.experts


@dataclass(frozen=True, slots=True)
class Paths:
    """Experts of tokens in their first l layers. `index`: (T, l, k) int64, the sentinel E allowed; `weight` alike."""

    index: torch.Tensor
    weight: torch.Tensor

    def first(self, layers: int) -> "Paths":
        return Paths(self.index[:, :layers], self.weight[:, :layers])

    def rows(self, rows: torch.Tensor | slice) -> "Paths":
        return Paths(self.index[rows], self.weight[rows])


def known_layers(layer: int) -> int:
    """Return how many layers are known when `layer`, 1 or above, is predicted: at least the first one."""
    return max(1, layer - LEAD + 1)


class StateConstructor:
    """Builds states of one layer from `popularity` (E,) and `affinity` (E, E) from the last known layer."""

    def __init__(self, shape: StateShape, layer: int, popularity: torch.Tensor, affinity: torch.Tensor) -> None:
        self.shape = shape
        self.layer = layer
        self.popularity = popularity
        self.affinity = affinity
        # Shares are about 1/E; scaled like this they are about 1. The last row is the sentinel's.
        self.scaled_popularity = popularity * shape.experts
        self.scaled_affinity = torch.cat([affinity * shape.experts, torch.zeros_like(affinity[:1])])

    def to(self, device: torch.device) -> "StateConstructor":
        return StateConstructor(self.shape, self.layer, self.popularity.to(device), self.affinity.to(device))

    def build(self, sofar: Paths, before: Paths) -> torch.Tensor:
        """Return (T, size) float32 from the tokens' layers so far and the complete paths of the tokens before them."""
        shape = self.shape
        state = sofar.weight.new_zeros((len(sofar.index), shape.size), dtype=torch.float32)
        self._write(state[:, : shape.path], sofar)
        self._write(state[:, shape.path : 2 * shape.path], before)
        rest = state[:, 2 * shape.path :]
        rest[:, : shape.experts] = self.scaled_popularity
        rest[:, shape.experts :] = self.scaled_affinity[sofar.index[:, -1]].flatten(1)
        return state

    def _write(self, part: torch.Tensor, paths: Paths) -> None:
        """Write one path into its (T, path) of the state; unknown layers stay zero."""
        tokens, layers, _ = paths.index.shape
        # One place more for the sentinel, cut off afterwards.
        one_hot = part.new_zeros((tokens, 2, layers, self.shape.experts + 1))
        one_hot[:, 0].scatter_(2, paths.index, 1.0)
        one_hot[:, 1].scatter_(2, paths.index, paths.weight.float())
        whole = part.unflatten(1, (2, self.shape.layers, self.shape.experts))
        whole[:, :, :layers] = one_hot[..., : self.shape.experts]


class ExpertMLP(nn.Sequential):
    """A perceptron from states (T, S) to logits (T, E); batch norm, ReLU and dropout behind each hidden layer."""

    def __init__(self, inputs: int, outputs: int, widths: Sequence[int] = WIDTHS) -> None:
        layers: list[nn.Module] = []
        for before, behind in pairwise((inputs, *widths)):
            layers += [nn.Linear(before, behind), nn.BatchNorm1d(behind), nn.ReLU(), nn.Dropout(_DROPOUT)]
        super().__init__(*layers, nn.Linear(widths[-1], outputs))

    def folded(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return weight and bias of the trained layers, with batch norms folded in and without dropout."""
        folded: list[tuple[torch.Tensor, torch.Tensor]] = []
        for linear, behind in zip_longest(self, list(self)[1:]):
            if isinstance(linear, nn.Linear):
                layer = fuse_linear_bn_eval(linear, behind) if isinstance(behind, nn.BatchNorm1d) else linear
                folded.append((layer.weight.detach(), layer.bias.detach()))
        return folded


class LayerPredictor:
    """A trained ExpertMLP for inference: independent probabilities of experts; `folded` are its layers."""

    def __init__(self, states: StateConstructor, folded: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._states = states
        #: Weights (inputs, outputs), and biases.
        self._layers = [(weight.to(STORED_DTYPE).t().contiguous(), bias.to(STORED_DTYPE)) for weight, bias in folded]

    def to(self, device: torch.device) -> None:
        """Move to a device before the first use."""
        self._states = self._states.to(device)
        self._layers = [(weight.to(device), bias.to(device)) for weight, bias in self._layers]

    @torch.inference_mode()
    def probabilities(self, sofar: Paths, before: Paths) -> torch.Tensor:
        """Return each token's probability of each expert, (T, E) float32; arguments as `StateConstructor.build`."""
        if len(sofar.index) == 1 and sofar.index.device.type == "cpu":
            return self._single_token(sofar, before)[None].float().sigmoid()
        values = self._states.build(sofar, before).to(STORED_DTYPE)
        *hidden, (last, shift) = self._layers
        for weight, bias in hidden:
            values = torch.addmm(bias, values, weight).relu_()
        return torch.addmm(shift, values, last).float().sigmoid()

    @cached_property
    def _single_token(self) -> "_SingleToken":
        return _SingleToken(self._states, self._layers)


class _SingleToken:
    """A layer's network for a single token on a CPU, in as few torch calls as possible.

    At each torch call two threads may compete for the interpreter's lock, and the one that computes the model sleeps
    and wakes: 60 calls for each of five predictions took 6.9 ms a token instead of 2.9. The rest is reading the weights
    from memory. So inputs that are the same for every token are part of the bias, the first layer adds the rows that
    the token's path names, and the large layers read only weights whose input is not zero: half of them, behind a ReLU.
    """

    def __init__(self, states: StateConstructor, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        (first, bias), *rest = layers
        shape, weight = states.shape, first.float()
        paths, popular, affine = weight.split([2 * shape.path, shape.experts, shape.top_k * shape.experts])
        # One row more for each layer and rank: the sentinel's, which adds nothing. The last row is the bias.
        whole = torch.nn.functional.pad(paths.unflatten(0, (-1, shape.experts)), (0, 0, 0, 1))
        ranks = states.scaled_affinity @ affine.unflatten(0, (shape.top_k, shape.experts))
        always = bias.float() + states.scaled_popularity @ popular
        self._table = torch.cat([whole.flatten(0, 1), ranks.flatten(0, 1), always[None]])
        self._offsets, self._ones = _places(shape, known_layers(states.layer))
        self._begin = torch.zeros(1, dtype=torch.long)
        self._large = [layer for layer in rest if layer[0].numel() >= _SPARSE_WEIGHTS]
        self._small = [(table.t().contiguous(), shift) for table, shift in rest[len(self._large) :]]

    def __call__(self, sofar: Paths, before: Paths) -> torch.Tensor:
        """Return (E,) logits in STORED_DTYPE."""
        own, ranks = sofar.index.numpy(), sofar.index.shape[2]
        index = np.concatenate([own.ravel(), before.index.numpy().ravel()])
        places = np.concatenate([index, index, own[0, -1], _BIAS]) + self._offsets
        gates = [paths.weight.float().numpy().ravel() for paths in (sofar, before)]
        weight = np.concatenate([self._ones, *gates, self._ones[: ranks + 1]])
        values = self._sum(torch.from_numpy(places), self._table, torch.from_numpy(weight)).to(STORED_DTYPE)
        for table, shift in self._large:
            (used,) = values.relu_().nonzero(as_tuple=True)
            values = self._sum(used, table, values[used]).add_(shift)
        for table, shift in self._small:
            values = torch.addmv(shift, table, values.relu_())
        return values

    def _sum(self, places: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding_bag(places, table, self._begin, mode="sum", per_sample_weights=weight)[0]


def _places(shape: StateShape, layers: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the offsets from a token's experts to their rows of the table, and ones, the weights of chosen experts."""
    stride, top_k = shape.experts + 1, shape.top_k
    own = np.repeat(np.arange(layers), top_k)
    before = 2 * shape.layers + np.repeat(np.arange(shape.layers), top_k)
    rows = np.concatenate([own, before])
    ranks = 4 * shape.layers + np.arange(top_k + 1)  # the last one is the bias
    return np.concatenate([rows, rows + shape.layers, ranks]) * stride, np.ones(len(rows), np.float32)


# Training on a trace, layer by layer


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


def fit(prepared: PreparedFiles, _windows: TrainingWindows, progress: FitProgress) -> None:
    trace, recipe = load_trace(prepared, TRAIN), DuoServeRecipe()
    for layer in range(1, trace.layers):
        part = f"duoserve, layer {layer} of {trace.layers - 1}"
        if prepared.is_made(part_name(layer), _provenance(trace, recipe)):
            progress(f"{part}, there already", 1, 1)
            continue
        save_layer(prepared, layer, fit_layer(trace, layer, recipe, partial(progress, part)), trace, recipe)


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
    layers: int = prepared.load(part_name(1))[1]["shape"]["layers"]
    return {layer: _load(prepared, layer) for layer in range(1, layers)}


def _load(prepared: PreparedFiles, layer: int) -> LayerPredictor:
    with prepared.reading(part_name(layer)) as (tensors, notes):
        states = StateConstructor(StateShape(**notes["shape"]), layer, tensors["popularity"], tensors["affinity"])
        count = sum(name.endswith(".weight") for name in tensors)
        folded = [(tensors[f"{number}.weight"], tensors[f"{number}.bias"]) for number in range(count)]
        return LayerPredictor(states, folded)


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
