"""Only the most popular experts of each layer exist: what is not in memory is never loaded."""

import torch

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.gating import Routing
from experts.moe.model.masking import mask_gate, present
from experts.moe.modes.popularity import Popularity


class Prune(Popularity):
    """Static pruning: each gate chooses among the experts that are there, as SwapMoE's masked gating does.

    Not lossless. The choice of experts follows the budget and nothing else.
    """

    name = "prune"
    lossless = False
    transit = 0

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        #: By layer: who was there last, and the mask for that.
        self._allowed: dict[int, tuple[tuple[int, ...], torch.Tensor]] = {}

    def route(self, routing: Routing) -> Routing:
        here = self.cache.resident(routing.layer, guard=True)
        if routing.layer not in self._allowed or self._allowed[routing.layer][0] != here:
            self._allowed[routing.layer] = here, present(here, self.arch.experts)
        return mask_gate(routing, self._allowed[routing.layer][1], renormalise=self.arch.renormalise)

    def least_experts(self, arch: MoeArch) -> int:
        """A token's experts must be there in every layer."""
        return arch.layers * arch.top_k
