"""Masked gating: a gate's choice repeated over the experts that are in memory (SwapMoE §3.2, figure 7b).

Every family here ends its gate the same way: softmax over the logits in float32, the k largest, and in some families
those k divided by their sum (Mixtral always; Qwen2-MoE, Qwen3-MoE and OLMoE as `norm_topk_prob` says; Switch, with k of
one, never). Masking sets the logits of absent experts to -inf before that softmax, so that what they would have got is
shared by those present. Where all experts of a layer are present the gate's own choice comes back, the same object.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from experts.moe.gating import Routing


def present(experts: Iterable[int], count: int) -> torch.Tensor:
    """(count,) bool: which of a layer's experts are among `experts`."""
    mask = torch.zeros(count, dtype=torch.bool)
    mask[list(experts)] = True
    return mask


def mask_gate(routing: Routing, allowed: torch.Tensor, *, renormalise: bool) -> Routing:
    """The routing as the gate would have given it had it only the `allowed` experts.

    `allowed`: (E,) bool, or (T, E) where tokens differ; left on the host it costs a GPU no synchronisation.
    `renormalise` (of the MoeArch): whether the family divides the k weights by their sum. Rows that the gate itself had
    dropped (padding, Switch's capacity: the sentinel everywhere) stay dropped. Where fewer than k experts are allowed,
    the places left over carry the sentinel and weight 0.
    """
    if bool(allowed.all()):
        return routing
    sentinel = routing.logits.shape[-1]
    scores = routing.logits.float().masked_fill(~allowed.to(routing.logits.device), float("-inf"))
    # By score and not by probability: far-off ones underflow to 0, and absent experts have 0 too.
    best, index = torch.topk(scores, routing.index.shape[-1], dim=-1)
    nobody = torch.isneginf(best) | (routing.index >= sentinel).all(dim=-1, keepdim=True)
    # In a row with nothing allowed the softmax is 0/0, and all of it is filled here.
    weight = torch.softmax(scores, dim=-1).gather(-1, index).masked_fill(nobody, 0.0)
    if renormalise:
        weight = weight / weight.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    return replace(routing, index=index.masked_fill(nobody, sentinel), weight=weight.to(routing.weight.dtype))
