"""SwapMoE: each layer has a fixed number of experts in memory, its gate chooses among them, and swaps never block.

Online phase (§3.2, §3.3). A layer's gate is masked to the resident experts, so computing never waits for a fetch. Each
expert's importance comes from the gate before masking; at the end of a step the layers whose turn it is exchange
unimportant experts for important ones, in the loader's thread.
"""

from pathlib import Path

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey, ForwardStep, Routing, expert_mask, mask_gate
from experts.moe.model.mode import Mode, ModeOptions
from experts.moe.modes.swapmoe.planner import MemoryPlan, Preparation, load_preparation, plan_for
from experts.moe.policy.importance import Importance, UpdateTurns, VirtualExperts
from experts.moe.weights.expert_store import ExpertStore


def importance(routing: Routing, norms: torch.Tensor) -> torch.Tensor:
    """Return SwapMoE Eq. 2: the sum of ‖x‖·G(x)ᵢ·‖Eᵢ‖ over the tokens that the gate gave to expert i."""
    of_choice = routing.hidden.float().norm(dim=-1, keepdim=True) * routing.weight.float()
    experts = routing.logits.shape[-1]
    sums = torch.zeros(experts + 1, device=routing.index.device)  # the sentinel does not count
    sums.scatter_add_(0, routing.index.flatten().clamp(max=experts), of_choice.flatten())
    return sums[:experts] * norms


def expert_norms(store: ExpertStore) -> torch.Tensor:
    """Return the norm of each expert's weights, (L, E) float32. Reads the whole checkpoint. Raises ModelError."""
    arch = store.arch
    buffer = torch.empty(store.expert_bytes, dtype=torch.uint8)
    view, weights = buffer.numpy().data, arch.weights(buffer)
    norms = torch.empty(arch.layers, arch.experts)
    for key in arch.expert_keys:
        store.read(key, view)
        norms[key] = torch.stack([part.float().norm() for part in weights]).norm()
    return norms


class SwapMoeOptions(ModeOptions, frozen=True):
    """`counts`: experts of each layer, instead of the plan's or an even split.

    `period`: steps of an update cycle, in which each layer has one turn; None takes the plan's. `window`: tokens after
    which importance has halved. `prior_tokens`: weight of the importance known beforehand, in tokens.
    """

    counts: tuple[PositiveInt, ...] | None = None
    period: PositiveInt | None = None
    window: PositiveFloat = 32.0
    prior_tokens: NonNegativeFloat = 64.0


class SwapMoe(Mode):
    """Without a `preparation` memory is split evenly."""

    Options = SwapMoeOptions
    lossless = False

    def __init__(self, preparation: Preparation | None = None, options: SwapMoeOptions | None = None) -> None:
        super().__init__()
        self._preparation = preparation
        self._options = options or SwapMoeOptions()
        #: By layer of this step: importance (E,) on the model's device, and the number of its tokens.
        self._scores: dict[int, tuple[torch.Tensor, int]] = {}

    @classmethod
    def open(cls, checkpoint: Path, options: SwapMoeOptions) -> "SwapMoe":
        return cls(load_preparation(checkpoint), options)

    def eviction_policy(self, arch: MoeArch) -> VirtualExperts:
        self._importance = Importance(arch.layers, arch.experts, self._options.window, self._options.prior_tokens)
        self._virtual = VirtualExperts(self._importance, arch.layers, arch.experts, arch.top_k)
        return self._virtual

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        counts = self._options.counts
        if counts and (len(counts) != arch.layers or not all(arch.top_k <= count <= arch.experts for count in counts)):
            message = f"mode swapmoe, option counts: expected {arch.layers} numbers from {arch.top_k} to {arch.experts}"
            raise ModelError(cache.store.folder, message)
        if self._preparation is None:
            # No text has been seen: the heaviest experts first, as the paper's static pruning ranks them.
            norms = expert_norms(cache.store)
            self._preparation = Preparation(norms, norms)
        self._norms = self._preparation.norms
        self._importance.set_prior(self._preparation.importance.tolist())
        self.resize(cache.budget_bytes)
        cache.preload(ExpertKey(*key) for key in self._virtual.first())

    def route(self, routing: Routing) -> Routing:
        if self._norms.device != routing.hidden.device:
            self._norms = self._norms.to(routing.hidden.device)
        self._scores[routing.layer] = (importance(routing, self._norms[routing.layer]), len(routing.index))
        resident = self.cache.resident(routing.layer, guard=True)
        return mask_gate(routing, expert_mask(resident, self.arch.experts), renormalise=self.arch.renormalise)

    def end(self, step: ForwardStep) -> None:  # noqa: ARG002
        scores, self._scores = self._scores, {}
        if scores:
            # One copy from the device for all layers, after the last of them.
            rows = torch.stack([values for values, _ in scores.values()]).tolist()
            for (layer, (_, tokens)), row in zip(scores.items(), rows, strict=True):
                self._importance.add(layer, row, tokens)
        for layer, steps in self._turns.due():
            self._update(layer, steps)

    def resize(self, budget_bytes: int) -> None:
        """Give layers fewer or more virtual experts; additional ones are loaded in the layers' turns."""
        self.require_budget(budget_bytes, self.arch, self.cache.store.folder)
        plan = self._plan(budget_bytes)
        self._virtual.set_shares([count - self.arch.top_k for count in plan.counts])
        self._turns = UpdateTurns(self.arch.layers, self._options.period or plan.period)
        self.cache.resize(budget_bytes)

    def _plan(self, budget_bytes: int) -> MemoryPlan:
        arch = self.arch
        assert self._preparation is not None
        if self._options.counts is not None:
            return MemoryPlan(budget_bytes, self._options.counts, self._options.period or arch.layers)
        even = MemoryPlan(budget_bytes, (arch.experts,) * arch.layers, arch.layers)
        return plan_for(self._preparation.plans, budget_bytes) or even

    def _update(self, layer: int, steps: int) -> None:
        """Begin one step's part of a layer's swaps, planned anew in place of those not yet begun."""
        self.cache.cancel(layer)
        swaps = self._virtual.plan(layer, self.cache.slots, self.cache.pending())
        for swap in swaps[: len(swaps) // steps]:
            replaced = () if swap.evict is None else (ExpertKey(*swap.evict),)
            self.cache.prefetch([ExpertKey(*swap.load)], replace=replaced)
