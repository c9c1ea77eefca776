"""The predictor's input: what is known of a token when the experts of one of its layers are to be predicted.

DuoServe-MoE §4.2: s = [h, p, a]. h: the experts chosen so far, zero-padded to a fixed length. p: popularity of the
layer to be predicted. a: affinity of the layer to what was chosen. Ours (docs/decisions.md): h has one place for each
expert of each layer, with the gate's weights beside it, instead of the experts' numbers; the path of the token before
belongs to it; it ends `LEAD` layers before the one to be predicted, so that there is time to predict and to fetch; and
of a it takes the rows of the experts chosen last, since the whole matrix is the same for every token of a layer.
"""

from dataclasses import dataclass

import torch

#: A layer is predicted when the gate of the layer so far before it has spoken, or the first one. The paper's is 1.
LEAD = 2


@dataclass(frozen=True, slots=True)
class StateShape:
    """A model's layers, experts of each, and experts of a token."""

    layers: int
    experts: int
    top_k: int

    @property
    def path(self) -> int:
        """Numbers of one token's path: of each expert of each layer whether it was chosen, and with what weight."""
        return 2 * self.layers * self.experts

    @property
    def size(self) -> int:
        return 2 * self.path + self.experts + self.top_k * self.experts


@dataclass(frozen=True, slots=True)
class Paths:
    """Where tokens went in their first l layers. `index`: (T, l, k) int64, the sentinel E allowed; `weight` alike."""

    index: torch.Tensor
    weight: torch.Tensor

    def first(self, layers: int) -> "Paths":
        return Paths(self.index[:, :layers], self.weight[:, :layers])

    def rows(self, rows: torch.Tensor | slice) -> "Paths":
        return Paths(self.index[rows], self.weight[rows])


def known(layer: int) -> int:
    """How many layers have spoken when `layer`, 1 or above, is predicted: the first one at least."""
    return max(1, layer - LEAD + 1)


class StateConstructor:
    """Builds states of one layer to be predicted, for many tokens of a trace or for the few of a decode step."""

    def __init__(self, shape: StateShape, layer: int, popularity: torch.Tensor, affinity: torch.Tensor) -> None:
        """`popularity`: (E,) of `layer`; `affinity`: (E, E) to it from the last layer that is known by then."""
        self.shape = shape
        self.layer = layer
        self.popularity = popularity
        self.affinity = affinity
        # Shares are about 1/E; so scaled they are about 1. The row of the sentinel E leads nowhere.
        self.scaled_popularity = popularity * shape.experts
        self.scaled_affinity = torch.cat([affinity * shape.experts, torch.zeros_like(affinity[:1])])

    def to(self, device: torch.device) -> "StateConstructor":
        """The same on another device."""
        return StateConstructor(self.shape, self.layer, self.popularity.to(device), self.affinity.to(device))

    def build(self, sofar: Paths, before: Paths) -> torch.Tensor:
        """(T, size) float32 from the tokens' layers so far and the whole paths of the tokens before them."""
        shape = self.shape
        state = sofar.weight.new_zeros((len(sofar.index), shape.size), dtype=torch.float32)
        self._write(state[:, : shape.path], sofar)
        self._write(state[:, shape.path : 2 * shape.path], before)
        rest = state[:, 2 * shape.path :]
        rest[:, : shape.experts] = self.scaled_popularity
        rest[:, shape.experts :] = self.scaled_affinity[sofar.index[:, -1]].flatten(1)
        return state

    def _write(self, part: torch.Tensor, paths: Paths) -> None:
        """One path into its (T, path) of the state; layers that have not spoken stay zero."""
        tokens, layers, _ = paths.index.shape
        # One place more for the sentinel, cut off afterwards.
        chosen = part.new_zeros((tokens, 2, layers, self.shape.experts + 1))
        chosen[:, 0].scatter_(2, paths.index, 1.0)
        chosen[:, 1].scatter_(2, paths.index, paths.weight.float())
        whole = part.unflatten(1, (2, self.shape.layers, self.shape.experts))
        whole[:, :, :layers] = chosen[..., : self.shape.experts]
