"""Masked gating gives what each family's gate gives when the absent experts do not exist."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experts.moe.arch import FAMILIES, read_arch
from experts.moe.gating import Routing, expert_mask, mask_gate
from tests.experts.moe.tiny import build_tiny

EXPERTS, HIDDEN, TOKENS = 8, 32, 40


def a_gate(family: str, experts: int = EXPERTS) -> tuple[torch.nn.Module, bool]:
    """A family's gate, and whether its weights of a token add up to 1."""
    model = build_tiny(family)
    renormalise = read_arch(Path("tiny"), model.config, torch.float32).renormalise
    config = deepcopy(model.config)
    setattr(config, FAMILIES[family].experts_key, experts)
    gate = type(model.model.layers[0].mlp.gate)(config)
    torch.nn.init.normal_(gate.weight, generator=torch.Generator().manual_seed(0))
    return gate, renormalise


def states() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def routed(gate: torch.nn.Module, hidden: torch.Tensor) -> Routing:
    with torch.no_grad():
        logits, weight, index = gate(hidden)
    return Routing(layer=0, hidden=hidden, logits=logits, index=index, weight=weight)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_masked_gating_is_the_familys_own_gate_over_the_experts_present(family: str):
    present = [1, 3, 4, 6, 7]
    (gate, renormalise), (smaller, _) = a_gate(family), a_gate(family, len(present))
    smaller.weight.data.copy_(gate.weight[present])
    expected = routed(smaller, states())
    masked = mask_gate(routed(gate, states()), expert_mask(present, EXPERTS), renormalise=renormalise)
    assert torch.equal(masked.index, torch.tensor(present)[expected.index])
    torch.testing.assert_close(masked.weight, expected.weight)
    assert masked.weight.dtype == expected.weight.dtype


def test_places_that_no_expert_can_fill_carry_the_sentinel_and_no_weight():
    gate, _ = a_gate("mixtral")
    single = mask_gate(routed(gate, states()), expert_mask([5], EXPERTS), renormalise=True)
    assert single.index.tolist() == [[5, EXPERTS]] * TOKENS
    assert single.weight.tolist() == [[1.0, 0.0]] * TOKENS
    none = mask_gate(routed(gate, states()), expert_mask([], EXPERTS), renormalise=True)
    assert (none.index == EXPERTS).all()
    assert not none.weight.any()


def test_rows_that_the_gate_dropped_stay_dropped():
    routing = routed(a_gate("olmoe")[0], states())
    index, weight = routing.index.clone(), routing.weight.clone()
    index[:3], weight[:3] = EXPERTS, 0.0
    present = expert_mask([0, 1, 2], EXPERTS)
    masked = mask_gate(replace(routing, index=index, weight=weight), present, renormalise=False)
    assert (masked.index[:3] == EXPERTS).all()
    assert not masked.weight[:3].any()
    assert (masked.index[3:] < 3).all()


def test_an_expert_far_below_the_best_is_chosen_before_an_absent_one():
    logits = torch.tensor([[300.0, 250.0, 0.0, -200.0]])
    routing = Routing(0, torch.zeros(1, HIDDEN), logits, torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]]))
    masked = mask_gate(routing, expert_mask([0, 3], 4), renormalise=True)
    assert masked.index.tolist() == [[0, 3]]
