"""SwapMoE: each layer has a fixed number of experts in memory, its gate chooses among them, and swaps never block.

Online phase (§3.2, §3.3). A layer's gate is masked to the resident experts, so computing never waits for a fetch. Each
expert's importance comes from the gate before masking; at the end of a step the layers whose turn it is exchange
unimportant experts for important ones, in the loader's thread.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey, ForwardStep, Routing
from experts.moe.model.mode import KeepingMode, ModeOptions
from experts.moe.modes.swapmoe.planner import MemoryPlan, Preparation, load_preparation, plan_for
from experts.moe.policy.eviction import allot
from experts.moe.weights.checkpoint import ExpertStore


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


class Importance:
    """Importance of each expert for recent tokens, mixed with a prior, (L, E) float32 in any unit.

    A token's weight halves with every `window` tokens that follow it. The prior counts as `prior_tokens` tokens and
    does not fade, since a window is a small sample.
    """

    def __init__(self, prior: torch.Tensor, window: float, prior_tokens: float) -> None:
        self._prior = _shares(prior)
        self._window = window
        self._prior_tokens = prior_tokens
        self._recent = torch.zeros_like(prior)
        self._tokens = 0.0

    def add(self, scores: torch.Tensor, tokens: int) -> None:
        keep = 0.5 ** (tokens / self._window)
        self._recent = self._recent * keep + scores
        self._tokens = self._tokens * keep + tokens

    def values(self) -> torch.Tensor:
        """Return each expert's share of its layer's importance, (L, E)."""
        if not self._tokens:
            return self._prior
        weighted = _shares(self._recent) * self._tokens + self._prior * self._prior_tokens
        return weighted / (self._tokens + self._prior_tokens)


def _shares(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.sum(1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)


class SwapMoe(KeepingMode):
    """Without a `preparation` memory is split evenly. One slot is for the expert that is swapped in."""

    Options = SwapMoeOptions
    lossless = False

    def __init__(self, preparation: Preparation | None = None, options: SwapMoeOptions | None = None) -> None:
        super().__init__()
        self._preparation = preparation
        self._options = options or SwapMoeOptions()
        self._steps = 0
        #: By layer of this step: importance (E,) on the model's device.
        self._scores: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, list[int]] = {}

    @classmethod
    def open(cls, checkpoint: Path, options: SwapMoeOptions) -> "SwapMoe":
        return cls(load_preparation(checkpoint), options)

    def min_slots(self, arch: MoeArch) -> int:
        return min(super().min_slots(arch) + 1, len(arch.expert_keys))

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        counts = self._options.counts
        if counts and (len(counts) != arch.layers or not all(arch.top_k <= count <= arch.experts for count in counts)):
            message = f"mode swapmoe, option counts: expected {arch.layers} numbers from {arch.top_k} to {arch.experts}"
            raise ModelError(cache.store.folder, message)
        ready = self._preparation
        if ready is None:
            # No text has been seen: the heaviest experts first, as the paper's static pruning ranks them.
            norms = expert_norms(cache.store)
            ready = Preparation(norms, norms)
        self._norms, self._plans = ready.norms, ready.plans
        self._importance = Importance(ready.importance, self._options.window, self._options.prior_tokens)
        super().attach(cache, arch)

    def route(self, routing: Routing) -> Routing:
        if self._norms.device != routing.hidden.device:
            self._norms = self._norms.to(routing.hidden.device)
        self._scores[routing.layer] = importance(routing, self._norms[routing.layer])
        return self.among_residents(routing)

    def end(self, step: ForwardStep) -> None:
        scores, self._scores = self._scores, {}
        if len(scores) < self.arch.layers:
            return  # the step failed
        # One copy from the device for all layers, after the last of them.
        self._importance.add(torch.stack([scores[layer] for layer in range(self.arch.layers)]).cpu(), step.tokens)
        due = self._due()
        self._update(due)
        for layer in due:
            self.cache.cancel(layer)
            self.cache.prefetch([ExpertKey(layer, expert) for expert in self._chosen[layer]])

    def choose(self, slots: int) -> None:
        """Set the number of experts of each layer and the steps of an update cycle."""
        arch, budget_bytes = self.arch, slots * self.arch.expert_bytes
        even = MemoryPlan(budget_bytes, (arch.experts,) * arch.layers, arch.layers)
        plan = plan_for(self._plans, budget_bytes) or even
        planned, self._period = self._options.counts or plan.counts, self._options.period or plan.period
        staying = slots if slots == len(arch.expert_keys) else slots - 1
        self._counts = allot(staying, [count - arch.top_k for count in planned], arch.top_k, arch.experts)
        self._update(range(arch.layers))

    def _update(self, layers: Iterable[int]) -> None:
        """Keep the most important experts of these layers from now on."""
        values = self._importance.values()
        for layer in layers:
            self._chosen[layer] = values[layer].topk(self._counts[layer]).indices.tolist()
        self.keep((layer, expert) for layer, experts in self._chosen.items() for expert in experts)

    def _due(self) -> list[int]:
        """Return the layers to update now: in a cycle of `period` steps each has one turn (§3.3).

        Each cycle begins with another layer: if loads cannot keep up, the last ones of a step are not begun.
        """
        layers, period = self.arch.layers, self._period
        turns = range(self._steps * layers // period, (self._steps + 1) * layers // period)
        self._steps += 1
        return [(turn + turn // layers) % layers for turn in turns]
