"""The predictor's input: what is known of a token when the experts of its next layer are to be predicted.

DuoServe-MoE §4.2: s = [h, p, a]. h: the experts chosen so far, zero-padded to a fixed length. p: popularity of the
layer to be predicted. a: affinity between it and the layer before. Ours: h has one place for each expert of each layer
instead of the experts' numbers, with the gate's weights beside it, and of a it takes the rows of the experts that the
token has chosen, since the whole matrix is the same for every token of a layer (docs/decisions.md).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateShape:
    """A model's layers, experts of each, and experts of a token."""

    layers: int
    experts: int
    top_k: int

    @property
    def history(self) -> int:
        """Numbers of h: chosen or not, and with what weight; the last layer's experts are never part of it."""
        return 2 * (self.layers - 1) * self.experts

    @property
    def size(self) -> int:
        return self.history + self.experts + self.top_k * self.experts


class StateConstructor:
    """Builds states of one layer to be predicted, for many tokens of a trace or for the few of a decode step."""

    def __init__(self, shape: StateShape, popularity: torch.Tensor, affinity: torch.Tensor) -> None:
        """`popularity`: (E,) of the layer to be predicted; `affinity`: (E, E) from the layer before."""
        self.shape = shape
        self.popularity = popularity
        self.affinity = affinity
        # Shares are about 1/E; so scaled they are about 1. The row of the sentinel E leads nowhere.
        self._p = popularity * shape.experts
        self._a = torch.cat([affinity * shape.experts, torch.zeros_like(affinity[:1])])

    def to(self, device: torch.device) -> "StateConstructor":
        """The same on another device."""
        return StateConstructor(self.shape, self.popularity.to(device), self.affinity.to(device))

    def build(self, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(T, size) float32 from the layers before: `index` (T, l, k) int64, the sentinel E allowed; `weight` alike."""
        tokens, layers, _ = index.shape
        shape = self.shape
        # One place more for the sentinel, cut off afterwards.
        chosen = index.new_zeros((tokens, 2, layers, shape.experts + 1), dtype=torch.float32)
        chosen[:, 0].scatter_(2, index, 1.0)
        chosen[:, 1].scatter_(2, index, weight.float())
        state = chosen.new_zeros((tokens, shape.size))
        history = state[:, : shape.history].view(tokens, 2, shape.layers - 1, shape.experts)
        history[:, :, :layers] = chosen[..., : shape.experts]
        state[:, shape.history : shape.history + shape.experts] = self._p
        state[:, shape.history + shape.experts :] = self._a[index[:, -1]].flatten(1)
        return state
