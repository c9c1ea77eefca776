"""ExpertMLP: which experts of a layer a token will choose, as independent probabilities (DuoServe-MoE §4.2)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from experts.moe.duoserve.state import Paths, StateConstructor

#: Seven fully connected layers: these widths, halved from layer to layer, and the one of the output.
WIDTHS = (2048, 1024, 512, 256, 128, 64)
_DROPOUT = 0.1
#: What a trained network is kept and asked in; ranks of experts do not need more.
KEPT = torch.bfloat16
#: Tokens up to which reading fewer weights is faster than multiplying matrices.
_FEW = 2


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
        values = self._states.build(sofar, before).to(KEPT)
        *hidden, (last, shift) = self._layers
        through = _through_sparse if len(values) <= _FEW and values.device.type == "cpu" else _through
        for weight, bias in hidden:
            values = through(values, weight, bias).relu_()
        return _through(values, last, shift).float().sigmoid()


def _through(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """(T, inputs) to (T, outputs)."""
    return torch.addmm(bias, values, weight)


def _through_sparse(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same; of the weights only those are read whose input is not zero.

    One token's way through the network is as long as its weights take to come from memory, and behind a ReLU half of
    the inputs are zero: measured, 0.3 ms instead of 0.6.
    """
    rows, places = values.nonzero(as_tuple=True)
    begins = torch.searchsorted(rows, torch.arange(len(values)))
    summed = torch.nn.functional.embedding_bag(
        places, weight, begins, mode="sum", per_sample_weights=values[rows, places]
    )
    return summed.add_(bias)
