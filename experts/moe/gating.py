"""Values between model, mode and observers (a step, its rows, a layer's routing); masked gating (SwapMoE §3.2)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch


class ExpertKey(NamedTuple):
    """One expert of a model. `layer` counts the mixture-of-experts layers from 0; dense layers do not count."""

    layer: int
    expert: int


class ExpertWeights(NamedTuple):
    """Views of one slot. `gate_up` is (2I, H), the gate's rows first; `down` is (H, I)."""

    gate_up: torch.Tensor
    down: torch.Tensor


#: Experts that a mode serves to a layer, in ascending order; each is valid until the next one is requested.
ExpertIterator = Iterator[tuple[int, ExpertWeights]]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence of a step. `tokens` counts its positions in the step, padding included."""

    request: str
    task: str | None
    tokens: int


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """One forward of the model. A prefill is a step without a past, however many tokens it has.

    Tokens of a step's routings lie row after row: row 0 has the first `rows[0].tokens` of them.
    """

    phase: Literal["prefill", "decode"]
    rows: tuple[StepRow, ...]

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class Routing:
    """One layer's gate output for one step; T tokens, E experts, k of them for each token.

    An index may be the sentinel E: nothing is computed and its weight does not count. An index above E is an expert
    that only the mode knows (a united expert, for example), computed from the weights that the mode serves.
    """

    layer: int
    #: (T, H): input of the gate and of the experts.
    hidden: torch.Tensor
    #: (T, E) before the softmax, nothing masked.
    logits: torch.Tensor
    #: (T, k) int64, best first.
    index: torch.Tensor
    #: (T, k): factors of the experts' outputs.
    weight: torch.Tensor

    def distinct_experts(self) -> tuple[int, ...]:
        """Return the layer's chosen experts in ascending order, without the sentinel."""
        sentinel = self.logits.shape[-1]
        # A set of Python numbers: for one token five times as fast as Tensor.unique, for a prompt no slower.
        return tuple(sorted(set(self.index.flatten().tolist()) - {sentinel}))


def expert_mask(experts: Iterable[int], count: int) -> torch.Tensor:
    mask = torch.zeros(count, dtype=torch.bool)
    mask[list(experts)] = True
    return mask


def mask_gate(routing: Routing, allowed: torch.Tensor, *, renormalise: bool) -> Routing:
    """Return the routing that the gate would have given with the `allowed` experts only.

    Every family ends its gate the same way: softmax over the logits in float32, the k largest, and in some families
    those k divided by their sum (`renormalise`, of the MoeArch). Masking sets the logits of absent experts to -inf
    before that softmax. If all experts are allowed, the same object comes back.

    `allowed`: (E,) bool, or (T, E) where tokens differ; a mask on the host costs a GPU no synchronisation. Rows that
    the gate had dropped (padding: the sentinel everywhere) stay dropped. If fewer than k experts are allowed, the
    remaining places carry the sentinel and weight 0.
    """
    if bool(allowed.all()):
        return routing
    sentinel = routing.logits.shape[-1]
    scores = routing.logits.float().masked_fill(~allowed.to(routing.logits.device), float("-inf"))
    # By score and not by probability: far-off ones underflow to 0, and absent experts have 0 too.
    best, index = torch.topk(scores, routing.index.shape[-1], dim=-1)
    dropped = torch.isneginf(best) | (routing.index >= sentinel).all(dim=-1, keepdim=True)
    # In a row with nothing allowed the softmax is 0/0, and all of it is filled here.
    weight = torch.softmax(scores, dim=-1).gather(-1, index).masked_fill(dropped, 0.0)
    if renormalise:
        weight = weight / weight.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    return replace(routing, index=index.masked_fill(dropped, sentinel), weight=weight.to(routing.weight.dtype))
