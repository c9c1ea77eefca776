"""The module that stands in for a layer's experts: it holds no weights, asks the mode for them, and adds up.

Bit for bit what the unmodified modules compute. transformers has two orders of adding a token's experts, chosen by
`experts_implementation` of the model's configuration, and this module follows the same setting: `eager` adds them one
after the other by ascending index, all others (`grouped_mm` is the default) sum them in the order of the gate.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from experts.moe.arch import MoeArch
from experts.moe.gating import ExpertIterator, ExpertWeights, Routing


class Router(Protocol):
    """Whom a layer asks: the runtime, on behalf of the mode."""

    def carry_out(self, routing: Routing) -> tuple[Routing, ExpertIterator]:
        """The routing to compute, and the weights for it in ascending order of experts."""
        ...


class OffloadedExperts(nn.Module):
    """In place of `mlp.experts` of Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE. No parameters.

    `logits` are the gate's, (T, E), left here by a hook on it just before this module is called.
    """

    def __init__(self, layer: int, arch: MoeArch, config: Any, activation: nn.Module, router: Router) -> None:
        super().__init__()
        self.layer = layer
        self.sentinel = arch.experts
        self.config = config
        self.act_fn = activation
        self.logits: torch.Tensor | None = None
        self._router = router

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states: (T, H); top_k_index: (T, k), the sentinel E computes nothing; top_k_weights: (T, k)."""
        assert self.logits is not None, "the gate runs before its experts"
        logits, self.logits = self.logits, None
        routing = Routing(self.layer, hidden_states, logits, top_k_index, top_k_weights)
        routing, served = self._router.carry_out(routing)
        by_index = self.config._experts_implementation == "eager"
        return (add_by_index if by_index else add_by_rank)(routing, served, self.sentinel, self._compute)

    def _compute(self, states: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        """(n, H) to (n, H) through one expert."""
        gate, up = functional.linear(states, weights.gate_up).chunk(2, dim=-1)
        return functional.linear(self.act_fn(gate) * up, weights.down)


Compute = Callable[[torch.Tensor, ExpertWeights], torch.Tensor]


def add_by_index(routing: Routing, served: ExpertIterator, sentinel: int, compute: Compute) -> torch.Tensor:
    """As `eager` does: rows of one expert by rank and then by token, added into the sum at once."""
    total = torch.zeros_like(routing.hidden)
    ranked = routing.index.t()
    left = int((ranked != sentinel).sum())
    for expert, weights in served:
        rank, token = torch.where(ranked == expert)
        output = compute(routing.hidden[token], weights) * routing.weight[token, rank, None]
        total.index_add_(0, token, output.to(total.dtype))
        left -= len(token)
    _require_all(left, routing.layer)
    return total


def add_by_rank(routing: Routing, served: ExpertIterator, sentinel: int, compute: Compute) -> torch.Tensor:
    """As `grouped_mm` does: rows of one expert in the order of a sort, summed over ranks when all are there."""
    tokens, ranks = routing.index.shape
    ordered, places = torch.sort(routing.index.reshape(-1))
    flat_weight = routing.weight.reshape(-1)
    # Mixtral's weights stay float32 beside states of bfloat16, and so does the sum.
    dtype = torch.promote_types(routing.hidden.dtype, routing.weight.dtype)
    outputs = routing.hidden.new_zeros(tokens * ranks, routing.hidden.shape[-1], dtype=dtype)
    known = ordered.tolist()  # once, so that no expert makes the host wait for the GPU
    left = len(known) - known.count(sentinel)
    for expert, weights in served:
        begin, end = bisect_left(known, expert), bisect_right(known, expert)
        rows = places[begin:end]
        output = compute(routing.hidden[rows // ranks], weights)
        outputs[rows] = output * flat_weight[rows].unsqueeze(-1)
        left -= end - begin
    _require_all(left, routing.layer)
    return outputs.view(tokens, ranks, -1).sum(dim=1).to(routing.hidden.dtype)


def _require_all(left: int, layer: int) -> None:
    if left:
        raise AssertionError(f"layer {layer}: the mode left {left} tokens without the expert it gave them")
