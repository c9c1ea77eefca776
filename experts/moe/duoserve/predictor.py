"""ExpertMLP: which experts of a layer a token will choose, as independent probabilities (DuoServe-MoE §4.2)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from experts.moe.duoserve.state import Paths, StateConstructor

#: Seven fully connected layers: these widths, halved from layer to layer, and the one of the output.
WIDTHS = (2048, 1024, 512, 256, 128, 64)
_DROPOUT = 0.1


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

    def __init__(self, states: StateConstructor, folded: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.shape = states.shape
        self._states = states
        self._folded = tuple(folded)

    def to(self, device: torch.device) -> "Predictor":
        """The same on another device."""
        return Predictor(self._states.to(device), [(each.to(device), shift.to(device)) for each, shift in self._folded])

    @torch.inference_mode()
    def probabilities(self, sofar: Paths, before: Paths) -> torch.Tensor:
        """(T, E) float32: for each token how likely it chooses each expert; arguments as `StateConstructor.build`."""
        values = self._states.build(sofar, before).to(self._folded[0][0].dtype)
        *hidden, (last, bias) = self._folded
        for each, shift in hidden:
            values = nn.functional.linear(values, each, shift).relu_()
        return nn.functional.linear(values, last, bias).float().sigmoid()
