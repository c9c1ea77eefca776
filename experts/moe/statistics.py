"""What traces say about experts by counting alone: popularity, affinity, and the predictions that each gives.

Every learned predictor is shown beside these two. Shapes: N tokens, L layers, E experts, k of them for each token.
"""

import torch

from experts.moe.trace import Trace, popularity

__all__ = ["affine_experts", "affinity", "popular_experts", "popularity"]


def affinity(trace: Trace, before: int, layer: int) -> torch.Tensor:
    """(E, E) float32, row i: how tokens with expert i of layer `before` spread over the experts of `layer`.

    Each row sums to 1 (DuoServe-MoE Eq. 3, there for neighbours); that of an expert which no token chose is the
    layer's popularity.
    """
    index = trace.index.long()
    pairs = index[:, before, :, None] * trace.experts + index[:, layer, None, :]
    counts = torch.bincount(pairs.flatten(), minlength=trace.experts**2).view(trace.experts, trace.experts)
    seen = counts.sum(1, keepdim=True)
    return torch.where(seen > 0, counts / seen.clamp(min=1), popularity(trace)[layer])


def popular_experts(popular: torch.Tensor, count: int) -> torch.Tensor:
    """(count,) int64: the experts that a layer's popularity, (E,), names first."""
    return popular.topk(count).indices


def affine_experts(rows: torch.Tensor, chosen: torch.Tensor, count: int) -> torch.Tensor:
    """(N, count) int64: the experts to which a token's experts in the layer before, (N, k), lead most often together.

    `rows`: `affinity` from that layer, (E, E).
    """
    return rows[chosen].sum(1).topk(count).indices
