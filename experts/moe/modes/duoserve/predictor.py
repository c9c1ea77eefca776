"""ExpertMLP: which experts of a layer a token will choose, as independent probabilities (DuoServe-MoE §4.2)."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from experts.moe.modes.duoserve.state import Paths, StateConstructor, StateShape, known

#: Seven fully connected layers: these widths, halved from layer to layer, and the one of the output.
WIDTHS = (2048, 1024, 512, 256, 128, 64)
_DROPOUT = 0.1
#: Weights of a layer from which reading only those whose input is not zero saves time.
_LARGE = 500_000
_NOTHING = np.zeros(1, np.int64)
#: What a trained network is kept and asked in; ranks of experts do not need more.
KEPT = torch.bfloat16


class ExpertMLP(nn.Sequential):
    """States (T, S) to logits (T, E); batch norm, ReLU and dropout behind each hidden layer."""

    def __init__(self, inputs: int, outputs: int, widths: Sequence[int] = WIDTHS) -> None:
        layers: list[nn.Module] = []
        for before, behind in pairwise((inputs, *widths)):
            layers += [nn.Linear(before, behind), nn.BatchNorm1d(behind), nn.ReLU(), nn.Dropout(_DROPOUT)]
        super().__init__(*layers, nn.Linear(widths[-1], outputs))

    @torch.no_grad()
    def folded(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Weight and bias of the seven layers as they are after training: batch norms folded in, dropout gone."""
        folded: list[tuple[torch.Tensor, torch.Tensor]] = []
        modules = list(self)
        for position, linear in enumerate(modules):
            if not isinstance(linear, nn.Linear):
                continue
            weight, bias = linear.weight.clone(), linear.bias.clone()
            norm = modules[position + 1] if position + 1 < len(modules) else None
            if isinstance(norm, nn.BatchNorm1d):
                assert norm.running_mean is not None and norm.running_var is not None  # noqa: PT018
                scale = norm.weight / (norm.running_var + norm.eps).sqrt()
                weight *= scale[:, None]
                bias = (bias - norm.running_mean) * scale + norm.bias
            folded.append((weight, bias))
        return folded


class Predictor:
    """A trained ExpertMLP of one layer, ready to be asked. Thread-safe."""

    def __init__(self, states: StateConstructor, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """`layers`: weights as (inputs, outputs), so that the numbers of one input lie together, and biases."""
        self.shape = states.shape
        self._states = states
        self._layers = tuple(layers)

    @classmethod
    def of(cls, states: StateConstructor, folded: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> "Predictor":
        """From what `ExpertMLP.folded` gives."""
        return cls(states, [(weight.to(KEPT).t().contiguous(), bias.to(KEPT)) for weight, bias in folded])

    def to(self, device: torch.device) -> "Predictor":
        """The same on another device."""
        return Predictor(self._states.to(device), [(one.to(device), two.to(device)) for one, two in self._layers])

    @torch.inference_mode()
    def probabilities(self, sofar: Paths, before: Paths) -> torch.Tensor:
        """(T, E) float32: for each token how likely it chooses each expert; arguments as `StateConstructor.build`."""
        if len(sofar.index) == 1 and sofar.index.device.type == "cpu":
            return self._alone(sofar, before)[None].float().sigmoid()
        values = self._states.build(sofar, before).to(KEPT)
        *hidden, (last, shift) = self._layers
        for weight, bias in hidden:
            values = torch.addmm(bias, values, weight).relu_()
        return torch.addmm(shift, values, last).float().sigmoid()

    @cached_property
    def _alone(self) -> "_Alone":
        return _Alone(self._states, self._layers)


class _Alone:
    """The same network for a single token on a CPU, in as few steps as it takes.

    At each step of torch two threads may meet at the interpreter's lock, and the one that computes the model then
    sleeps and wakes: 60 steps for each of five predictions made a token take 6.9 ms instead of 2.9. And a token's way
    through the network takes as long as its weights take to come from memory. So what is the same for every token lies
    in the bias, the first layer adds the rows that the token's path names, and the two large ones read only the weights
    whose input is not zero: half of them, behind a ReLU.
    """

    def __init__(self, states: StateConstructor, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        (first, bias), *rest = layers
        shape, weight = states.shape, first.float()
        paths, popular, affine = weight.split([2 * shape.path, shape.experts, shape.top_k * shape.experts])
        # One row more for each layer and rank: that of the sentinel, which adds nothing. The last row is the bias.
        whole = torch.nn.functional.pad(paths.unflatten(0, (-1, shape.experts)), (0, 0, 0, 1))
        ranks = states.scaled_affinity @ affine.unflatten(0, (shape.top_k, shape.experts))
        always = bias.float() + states.scaled_popularity @ popular
        self._table = torch.cat([whole.flatten(0, 1), ranks.flatten(0, 1), always[None]])
        self._offsets, self._ones = _places(shape, known(states.layer))
        self._begin = torch.zeros(1, dtype=torch.long)
        self._large = [layer for layer in rest if layer[0].numel() >= _LARGE]
        self._small = [(each.t().contiguous(), shift) for each, shift in rest[len(self._large) :]]

    def __call__(self, sofar: Paths, before: Paths) -> torch.Tensor:
        """(E,) logits in the kept precision."""
        own, ranks = sofar.index.numpy(), sofar.index.shape[2]
        index = np.concatenate([own.ravel(), before.index.numpy().ravel()])
        places = np.concatenate([index, index, own[0, -1], _NOTHING]) + self._offsets
        gates = [one.weight.float().numpy().ravel() for one in (sofar, before)]
        weight = np.concatenate([self._ones, *gates, self._ones[: ranks + 1]])
        values = self._sum(torch.from_numpy(places), self._table, torch.from_numpy(weight)).to(KEPT)
        for table, shift in self._large:
            (used,) = values.relu_().nonzero(as_tuple=True)
            values = self._sum(used, table, values[used]).add_(shift)
        for each, shift in self._small:
            values = torch.addmv(shift, each, values.relu_())
        return values

    def _sum(self, places: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(outputs,): rows of a table times weights."""
        return torch.nn.functional.embedding_bag(places, table, self._begin, mode="sum", per_sample_weights=weight)[0]


def _places(shape: StateShape, spoken: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """What is added to a token's experts for their rows of the table; and ones, the weight of having been chosen."""
    stride, top_k = shape.experts + 1, shape.top_k
    own = np.repeat(np.arange(spoken), top_k)
    before = 2 * shape.layers + np.repeat(np.arange(shape.layers), top_k)
    chosen = np.concatenate([own, before])
    ranks = 4 * shape.layers + np.arange(top_k + 1)  # the last one is the bias
    return np.concatenate([chosen, chosen + shape.layers, ranks]) * stride, np.ones(len(chosen), np.float32)
