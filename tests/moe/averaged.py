"""What distilled experts are measured against: experts of a group united by the means of their weights."""

import torch

from experts.moe.modes.brownout.united import UnitedExperts, averaged, read_expert
from experts.moe.policy.brownout import groups_in_order
from experts.moe.weights.expert_store import ExpertStore


def averaged_united(store: ExpertStore, way: int) -> UnitedExperts:
    """For a whole model."""
    arch = store.arch
    groups = groups_in_order(arch.experts, way)
    gate_up: list[torch.Tensor] = []
    down: list[torch.Tensor] = []
    for layer in range(arch.layers):
        means = [
            averaged(read_expert(store, layer, each) for each in range(arch.experts) if groups[each] == group)
            for group in range(groups[-1] + 1)
        ]
        gate_up.append(torch.stack([each.gate_up for each in means]).to(arch.dtype))
        down.append(torch.stack([each.down for each in means]).to(arch.dtype))
    return UnitedExperts(way, tuple(gate_up), tuple(down), (groups,) * arch.layers)
