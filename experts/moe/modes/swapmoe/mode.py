"""SwapMoE: a fixed number of virtual experts per layer is in memory, the gate chooses among them, swaps never block.

Online phase (§3.2, §3.3). A layer's gate is masked to the experts that are ready (masking.py), so computing
never waits for a fetch. What each expert would have been worth is taken from the gate before masking; at the end of a
step the layers whose turn it is exchange unimportant experts for important ones, in the loader's thread.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey, ForwardStep, Routing
from experts.moe.model.masking import mask_gate, present
from experts.moe.model.mode import BaseMode
from experts.moe.modes.options import Options, read_options
from experts.moe.modes.swapmoe.plan import MemoryPlan, Preparation, load_preparation, plan_for
from experts.moe.policy.importance import Importance, UpdateTurns, VirtualExperts
from experts.moe.weights.expert_store import ExpertStore

#: A routing before masking and the layer's expert norms, (E,), to the importance of its experts, (E,) float.
Score = Callable[[Routing, torch.Tensor], torch.Tensor]

WINDOW_TOKENS = 32.0
PRIOR_TOKENS = 64.0


def importance(routing: Routing, norms: torch.Tensor) -> torch.Tensor:
    """SwapMoE Eq. 2: the sum of ‖x‖·G(x)ᵢ·‖Eᵢ‖ over the tokens that the gate gave to expert i."""
    of_choice = routing.hidden.float().norm(dim=-1, keepdim=True) * routing.weight.float()
    return _gather(routing, of_choice) * norms


def token_count(routing: Routing, _norms: torch.Tensor) -> torch.Tensor:
    """The paper's first assumption (§3.2), kept for comparison: how many tokens the gate gave to expert i."""
    return _gather(routing, torch.ones_like(routing.weight, dtype=torch.float32))


SCORES: dict[str, Score] = {"importance": importance, "tokens": token_count}


def _gather(routing: Routing, of_choice: torch.Tensor) -> torch.Tensor:
    """(T, k) to (E,): sums over what each expert was chosen for; the sentinel counts for nobody."""
    experts = routing.logits.shape[-1]
    sums = torch.zeros(experts + 1, device=routing.index.device)
    sums.scatter_add_(0, routing.index.flatten().clamp(max=experts), of_choice.flatten())
    return sums[:experts]


def expert_norms(store: ExpertStore) -> torch.Tensor:
    """(L, E) float32: the magnitude of each expert's weights. Reads the whole checkpoint once. Raises ModelError."""
    arch = store.arch
    buffer = torch.empty(store.expert_bytes, dtype=torch.uint8)
    view, weights = buffer.numpy().data, store.weights(buffer)
    norms = torch.empty(arch.layers, arch.experts)
    for key in arch.keys():  # noqa: SIM118
        store.read(key, view)
        norms[key] = torch.stack([part.float().norm() for part in weights]).norm()
    return norms


class _Options(Options, frozen=True):
    counts: tuple[PositiveInt, ...] | None = None
    period: PositiveInt | None = None
    window: PositiveFloat = WINDOW_TOKENS
    prior_tokens: NonNegativeFloat = PRIOR_TOKENS
    score: Literal["importance", "tokens"] = "importance"


class SwapMoe(BaseMode):
    """`preparation`: norms, importance before the first token, and plans; without it memory is split evenly.

    `period`: steps of an update cycle, in which each layer has one turn; None takes the plan's. `window`: tokens after
    which importance has halved. `prior_tokens`: how many tokens the importance known beforehand counts for.
    """

    name = "swapmoe"
    lossless = False

    def __init__(
        self,
        preparation: Preparation | None = None,
        *,
        counts: tuple[int, ...] | None = None,
        period: int | None = None,
        window: float = WINDOW_TOKENS,
        prior_tokens: float = PRIOR_TOKENS,
        score: Score = importance,
    ) -> None:
        super().__init__()
        self._preparation = preparation
        self._counts = counts
        self._period = period
        self._window = window
        self._prior_tokens = prior_tokens
        self._score = score
        #: What each layer of this step said: (E,) on the model's device, and how many tokens it is of.
        self._said: dict[int, tuple[torch.Tensor, int]] = {}

    @classmethod
    def open(cls, checkpoint: Path, options: Mapping[str, Any]) -> "SwapMoe":
        """Options: `counts`, `period`, `window`, `prior_tokens`, `score` (importance or tokens). Raises ModelError."""
        chosen = read_options(_Options, "swapmoe", checkpoint, options)
        return cls(
            load_preparation(checkpoint),
            counts=chosen.counts,
            period=chosen.period,
            window=chosen.window,
            prior_tokens=chosen.prior_tokens,
            score=SCORES[chosen.score],
        )

    def residency(self, arch: MoeArch) -> VirtualExperts:
        self._importance = Importance(arch.layers, arch.experts, self._window, self._prior_tokens)
        self._virtual = VirtualExperts(self._importance, arch.layers, arch.experts, arch.top_k)
        return self._virtual

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        self._require_fit()
        ready = self._preparation or Preparation.of(expert_norms(cache.store))
        self._preparation = ready
        self._norms = ready.norms
        self._importance.believe(ready.importance.tolist())
        self.resize(cache.budget_bytes)
        cache.fill(ExpertKey(*key) for key in self._virtual.first())

    def route(self, routing: Routing) -> Routing:
        if self._norms.device != routing.hidden.device:
            self._norms = self._norms.to(routing.hidden.device)
        self._said[routing.layer] = (self._score(routing, self._norms[routing.layer]), len(routing.index))
        ready = self.cache.resident(routing.layer, guard=True)
        return mask_gate(routing, present(ready, self.arch.experts), renormalise=self.arch.renormalise)

    def end(self, step: ForwardStep) -> None:  # noqa: ARG002
        said, self._said = self._said, {}
        if said:
            # One copy from the device for all layers, after the last of them.
            rows = torch.stack([values for values, _ in said.values()]).tolist()
            for (layer, (_, tokens)), row in zip(said.items(), rows, strict=True):
                self._importance.add(layer, row, tokens)
        for layer, steps in self._turns.due():
            self._update(layer, steps)

    def resize(self, budget_bytes: int) -> None:
        """Layers give away or get virtual experts; what is new is loaded in the layers' turns."""
        arch, cache = self.arch, self.cache
        least_bytes = arch.layers * arch.top_k * cache.store.expert_bytes
        if budget_bytes < least_bytes:
            message = f"mode swapmoe keeps {arch.top_k} experts of each of {arch.layers} layers in memory at least"
            raise ModelError(
                cache.store.folder, f"{message}, {least_bytes} bytes, and has {budget_bytes}; give it more"
            )
        plan = self._plan(budget_bytes)
        self._virtual.share([count - arch.top_k for count in plan.counts])
        self._turns = UpdateTurns(arch.layers, self._period or plan.period)
        cache.resize(budget_bytes)

    def _require_fit(self) -> None:
        """Raise ModelError where a configuration, or what was prepared, is of another model."""
        arch, counts, ready = self.arch, self._counts, self._preparation
        if counts is not None and not (
            len(counts) == arch.layers and all(arch.top_k <= count <= arch.experts for count in counts)
        ):
            message = f"mode swapmoe, option counts: expected {arch.layers} numbers from {arch.top_k} to {arch.experts}"
            raise ModelError(self.cache.store.folder, message)
        if ready is not None and ready.norms.shape != (arch.layers, arch.experts):
            message = f"the plan is not of {arch.layers} layers of {arch.experts} experts"
            raise ModelError(self.cache.store.folder, f"{message}; make it again with `coserve moe plan`")

    def _plan(self, budget_bytes: int) -> MemoryPlan:
        arch = self.arch
        assert self._preparation is not None
        if self._counts is not None:
            return MemoryPlan(budget_bytes, self._counts, self._period or arch.layers)
        made = plan_for(self._preparation.plans, budget_bytes)
        return made or MemoryPlan(budget_bytes, (arch.experts,) * arch.layers, arch.layers)

    def _update(self, layer: int, steps: int) -> None:
        """Begin one step's part of a layer's pending swaps; what of the last ones has not begun is planned anew."""
        self.cache.cancel(layer)
        swaps = self._virtual.plan(layer, self.cache.slots, self.cache.pending())
        for swap in swaps[: len(swaps) // steps]:
            room = () if swap.evict is None else (ExpertKey(*swap.evict),)
            self.cache.prefetch([ExpertKey(*swap.load)], replace=room)
