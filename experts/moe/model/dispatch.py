"""Modules that replace a layer's experts: without weights of their own, they compute with the experts a mode serves.

Bit for bit what the unmodified modules compute. transformers adds a token's experts in one of two orders, chosen by
`experts_implementation` of the model's configuration, which this module follows: `eager` adds them one after the other
by ascending index, all others (`grouped_mm` is the default) sum them in the order of the gate.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from experts.moe.arch import MoeArch
from experts.moe.gating import ExpertIterator, ExpertWeights, Routing

if TYPE_CHECKING:
    from experts.moe.model.runtime import MoeRuntime

#: One layer's gate without its choice: (T, H) to logits (T, E).
Gate = Callable[[torch.Tensor], torch.Tensor]
#: (n, H) to (n, H) through one expert.
Compute = Callable[[torch.Tensor, ExpertWeights], torch.Tensor]


class OffloadedExperts(nn.Module):
    """Replaces `mlp.experts` of every family, without parameters; a hook on the gate sets `logits` just before."""

    def __init__(self, layer: int, arch: MoeArch, config: Any, activation: nn.Module, runtime: "MoeRuntime") -> None:
        super().__init__()
        self.layer = layer
        self.sentinel = arch.experts
        self.config = config
        self.act_fn = activation
        self.logits: torch.Tensor | None = None
        self._runtime = runtime

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states: (T, H); top_k_index: (T, k), the sentinel E computes nothing; top_k_weights: (T, k)."""
        routing = Routing(self.layer, hidden_states, self._take_logits(), top_k_index, top_k_weights)
        routing, served = self._runtime.route_layer(routing)
        by_index = self.config._experts_implementation == "eager"
        return (add_by_index if by_index else add_by_rank)(routing, served, self.sentinel, self._compute)

    def _take_logits(self) -> torch.Tensor:
        assert self.logits is not None, "the gate runs before its experts"
        logits, self.logits = self.logits.reshape(-1, self.sentinel), None
        return logits

    def _compute(self, states: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        gate, up = functional.linear(states, weights.gate_up).chunk(2, dim=-1)
        return functional.linear(self.act_fn(gate) * up, weights.down)


def replace_experts(block: Any, layer: int, arch: MoeArch, config: Any, runtime: "MoeRuntime") -> None:
    """Replace a block's experts by a module without weights, and hand it the gate's logits by a hook."""
    block.experts = experts = OffloadedExperts(layer, arch, config, block.experts.act_fn, runtime)
    block.gate.register_forward_hook(lambda _gate, _args, output: setattr(experts, "logits", output[0]))


def add_by_index(routing: Routing, served: ExpertIterator, sentinel: int, compute: Compute) -> torch.Tensor:
    """Add experts as `eager` does: rows of one expert by rank and then by token, added to the sum at once."""
    total = torch.zeros_like(routing.hidden)
    ranked = routing.index.t()
    missing = int((ranked != sentinel).sum())
    for expert, weights in served:
        rank, token = torch.where(ranked == expert)
        output = compute(routing.hidden[token], weights) * routing.weight[token, rank, None]
        total.index_add_(0, token, output.to(total.dtype))
        missing -= len(token)
    _require_all(missing, routing.layer)
    return total


def add_by_rank(routing: Routing, served: ExpertIterator, sentinel: int, compute: Compute) -> torch.Tensor:
    """Add experts as `grouped_mm` does: rows of one expert in the order of a sort, summed over ranks at the end."""
    tokens, ranks = routing.index.shape
    ordered, places = torch.sort(routing.index.reshape(-1))
    flat_weight = routing.weight.reshape(-1)
    # Mixtral's weights stay float32 beside states of bfloat16, and so does the sum.
    dtype = torch.promote_types(routing.hidden.dtype, routing.weight.dtype)
    outputs = routing.hidden.new_zeros(tokens * ranks, routing.hidden.shape[-1], dtype=dtype)
    experts = ordered.tolist()  # once, so that no expert makes the host wait for the GPU
    missing = len(experts) - experts.count(sentinel)
    for expert, weights in served:
        begin, end = bisect_left(experts, expert), bisect_right(experts, expert)
        rows = places[begin:end]
        outputs[rows] = compute(routing.hidden[rows // ranks], weights) * flat_weight[rows].unsqueeze(-1)
        missing -= end - begin
    _require_all(missing, routing.layer)
    return outputs.view(tokens, ranks, -1).sum(dim=1).to(routing.hidden.dtype)


def _require_all(missing: int, layer: int) -> None:
    if missing:
        raise AssertionError(f"layer {layer}: the mode did not serve the experts of {missing} choices")
