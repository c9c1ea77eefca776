"""Switch Transformers' own ways: an encoder and a decoder, one expert for each token, experts without a gate.

Its router takes (batch, tokens, H) and answers with a one-hot choice in which tokens beyond an expert's capacity have
no 1: they pass the layer by, and carry the sentinel here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from experts.moe.arch import MoeArch
from experts.moe.gating import ExpertWeights, Routing
from experts.moe.model.dispatch import Router, add_by_index

FAMILY = "switch_transformers"


class SwitchExperts(nn.Module):
    """In place of `mlp.experts`. No parameters. `logits`: (batch, tokens, E), left here by a hook on the router."""

    def __init__(self, layer: int, arch: MoeArch, activation: nn.Module, router: Router) -> None:
        super().__init__()
        self.layer = layer
        self.sentinel = arch.experts
        self.act = activation
        self.logits: torch.Tensor | None = None
        self._router = router

    def forward(
        self, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states: (T, H); selected_experts: (T, 1, E) one-hot or all 0; routing_weights: (T, 1)."""
        assert self.logits is not None, "the router runs before its experts"
        logits, self.logits = self.logits.reshape(-1, self.sentinel), None
        chosen = selected_experts.argmax(dim=-1)
        index = chosen.masked_fill(selected_experts.sum(dim=-1) == 0, self.sentinel)
        routing = Routing(self.layer, hidden_states, logits, index, routing_weights)
        routing, served = self._router.carry_out(routing)
        return add_by_index(routing, served, self.sentinel, self._compute)

    def _compute(self, states: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        """(n, H) to (n, H) through one expert."""
        inner = self.act(functional.linear(states, weights.gate_up))
        return functional.linear(inner.to(weights.down.dtype), weights.down)


def replace_experts(block: Any, layer: int, arch: MoeArch, router: Router) -> None:
    """A block's experts give way to a module without weights, which a hook tells what the router said."""
    activation = next(iter(block.experts.values())).act
    block.experts = SwitchExperts(layer, arch, activation, router)
    block.router.register_forward_hook(partial(_leave_logits, block.experts))


def gate(block: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The router without its choice: (T, H) to logits (T, E)."""
    return partial(_logits, block.router)


def _logits(router: Any, states: torch.Tensor) -> torch.Tensor:
    classifier = router.classifier
    bias = None if classifier.bias is None else classifier.bias.to(router.dtype)
    return functional.linear(states.to(router.dtype), classifier.weight.to(router.dtype), bias)


def _leave_logits(experts: SwitchExperts, _router: nn.Module, _args: Any, said: tuple[torch.Tensor, ...]) -> None:
    experts.logits = said[2]
