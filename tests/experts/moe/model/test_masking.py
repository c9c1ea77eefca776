"""Masked gating gives what each family's gate gives when the absent experts do not exist."""

from dataclasses import replace

import pytest
import torch

from experts.moe.gating import Routing, expert_mask, mask_gate
from experts.moe.library import transformers

pytest.importorskip("transformers", reason="transformers is not installed (extra: moe)")
transformers()

from transformers import MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter  # noqa: E402
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter  # noqa: E402
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter  # noqa: E402

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 2, 16, 40

ROUTERS = {
    "mixtral": (
        lambda n: MixtralTopKRouter(MixtralConfig(num_local_experts=n, num_experts_per_tok=TOP_K, hidden_size=HIDDEN)),
        True,
    ),
    "olmoe": (
        lambda n: OlmoeTopKRouter(OlmoeConfig(num_experts=n, num_experts_per_tok=TOP_K, hidden_size=HIDDEN)),
        False,
    ),
    "qwen2_moe": (
        lambda n: Qwen2MoeTopKRouter(Qwen2MoeConfig(num_experts=n, num_experts_per_tok=TOP_K, hidden_size=HIDDEN)),
        False,
    ),
    "qwen3_moe": (
        lambda n: Qwen3MoeTopKRouter(
            Qwen3MoeConfig(num_experts=n, num_experts_per_tok=TOP_K, hidden_size=HIDDEN, norm_topk_prob=True)
        ),
        True,
    ),
}


def a_gate(family: str, seed: int = 0) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    gate = ROUTERS[family][0](EXPERTS)
    torch.nn.init.normal_(gate.weight)
    return gate, torch.randn(TOKENS, HIDDEN)


def routed(gate: torch.nn.Module, hidden: torch.Tensor) -> Routing:
    with torch.no_grad():
        logits, weight, index = gate(hidden)
    return Routing(layer=0, hidden=hidden, logits=logits, index=index, weight=weight)


@pytest.mark.parametrize("family", sorted(ROUTERS))
def test_masked_gating_is_the_familys_own_gate_over_the_experts_present(family: str):
    make, renormalise = ROUTERS[family]
    gate, hidden = a_gate(family)
    present = [1, 3, 4, 6, 7]
    smaller = make(len(present))
    with torch.no_grad():
        smaller.weight.copy_(gate.weight[present])
    expected = routed(smaller, hidden)
    masked = mask_gate(routed(gate, hidden), expert_mask(present, EXPERTS), renormalise=renormalise)
    assert torch.equal(masked.index, torch.tensor(present)[expected.index])
    torch.testing.assert_close(masked.weight, expected.weight)
    assert masked.weight.dtype == expected.weight.dtype


def test_places_that_no_expert_can_fill_carry_the_sentinel_and_no_weight():
    gate, hidden = a_gate("mixtral")
    single = mask_gate(routed(gate, hidden), expert_mask([5], EXPERTS), renormalise=True)
    assert single.index.tolist() == [[5, EXPERTS]] * TOKENS
    assert single.weight.tolist() == [[1.0, 0.0]] * TOKENS
    none = mask_gate(routed(gate, hidden), expert_mask([], EXPERTS), renormalise=True)
    assert (none.index == EXPERTS).all()
    assert not none.weight.any()


def test_rows_that_the_gate_dropped_stay_dropped():
    gate, hidden = a_gate("olmoe")
    routing = routed(gate, hidden)
    index, weight = routing.index.clone(), routing.weight.clone()
    index[:3], weight[:3] = EXPERTS, 0.0
    masked = mask_gate(replace(routing, index=index, weight=weight), expert_mask([0, 1, 2], EXPERTS), renormalise=False)
    assert (masked.index[:3] == EXPERTS).all()
    assert not masked.weight[:3].any()
    assert (masked.index[3:] < 3).all()


def test_an_expert_far_below_the_best_is_chosen_before_an_absent_one():
    logits = torch.tensor([[300.0, 250.0, 0.0, -200.0]])
    routing = Routing(0, torch.zeros(1, HIDDEN), logits, torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]]))
    masked = mask_gate(routing, expert_mask([0, 3], 4), renormalise=True)
    assert masked.index.tolist() == [[0, 3]]
