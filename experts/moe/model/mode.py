"""The base class of modes: a mode decides which experts are in memory, and which expert computes which token."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from pydantic import BaseModel

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertIterator, ExpertKey, ForwardStep, Routing, expert_mask, mask_gate
from experts.moe.model.dispatch import Gate
from experts.moe.policy.eviction import EvictionPolicy, KeepChosen, LayeredLru


class ModeOptions(BaseModel, extra="forbid", frozen=True):
    """Options of a mode in a configuration; modes that have some subclass it."""


class Mode:
    """One object for each model in service; this class itself loads on demand and evicts by last use.

    The computing thread calls `eviction_policy` and `attach` once, then for each step `begin`, for each layer `route`
    and `experts`, and `end`, also if the step failed.
    """

    Options: ClassVar[type[ModeOptions]] = ModeOptions
    #: True if the answers are those of the unmodified model, to the bit.
    lossless: ClassVar[bool] = True
    #: True if the next expert is loaded while one computes.
    load_ahead: ClassVar[bool] = False

    def __init__(self) -> None:
        #: One for each layer, set by the runtime before `attach`.
        self.gates: Sequence[Gate] = ()

    @classmethod
    def open(cls, checkpoint: Path, options: Any) -> "Mode":  # noqa: ARG003  not every mode reads the checkpoint
        """Make the mode; `options` are of the class `Options`. Raises ModelError if a prepared file is missing."""
        return cls()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the model's budget that the mode itself holds; slots have the rest."""
        return 0

    def min_slots(self, arch: MoeArch) -> int:
        """Return the fewest slots for the mode.

        A lossless mode may serve a layer in waves: it needs one slot for each layer, or one token's experts. A mode
        that chooses among resident experts needs a token's experts in each layer.
        """
        return min(arch.top_k, arch.layers) if self.lossless else arch.top_k * arch.layers

    def require_budget(self, budget_bytes: int, arch: MoeArch, folder: Path) -> None:
        """Raise ModelError if the budget is too small."""
        slots, own_bytes = self.min_slots(arch), self.reserved_bytes
        min_bytes = slots * arch.expert_bytes + own_bytes
        if budget_bytes < min_bytes:
            beside = f" and {own_bytes} bytes of its own" if own_bytes else ""
            message = f"a budget of {budget_bytes} bytes is too small: the mode keeps {slots} experts of"
            message += f" {arch.expert_bytes} bytes{beside} in memory; give at least {min_bytes} bytes"
            raise ModelError(folder, f"{message}, or choose another mode")

    def eviction_policy(self, arch: MoeArch) -> EvictionPolicy:
        return LayeredLru(arch.layers)

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        """Take the cache, and load the experts that should be in memory from the start. Raises ModelError."""
        self.cache = cache
        self.arch = arch

    def begin(self, step: ForwardStep) -> None:
        self.step = step

    def route(self, routing: Routing) -> Routing:
        """Return the routing to carry out; a lossless mode returns `routing` itself."""
        return routing

    def among_residents(self, routing: Routing) -> Routing:
        """Return the routing to the layer's resident experts, which stay until it has been served."""
        resident = self.cache.resident(routing.layer, guard=True)
        return mask_gate(routing, expert_mask(resident, self.arch.experts), renormalise=self.arch.renormalise)

    def experts(self, routing: Routing) -> ExpertIterator:
        """Serve the experts of a routing that `route` returned. Raises ModelError."""
        return self.cache.serve(routing.layer, routing.distinct_experts(), ahead=self.load_ahead)

    def end(self, step: ForwardStep) -> None: ...

    def resize(self, budget_bytes: int) -> None:
        """Change the budget while serving. Raises ModelError if it is too small for the mode."""
        self.require_budget(budget_bytes, self.arch, self.cache.store.folder)
        self.cache.resize(budget_bytes - self.reserved_bytes)

    def close(self) -> None:
        """Release what the mode holds outside the cache."""


class KeepingMode(Mode):
    """Keeps the experts that `choose` chooses; the others are loaded only if a routing needs them."""

    def __init__(self) -> None:
        super().__init__()
        self._policy = KeepChosen()

    def eviction_policy(self, arch: MoeArch) -> EvictionPolicy:  # noqa: ARG002
        return self._policy

    def choose(self, slots: int) -> None:
        """Choose experts for so many slots, and call `keep`."""
        raise NotImplementedError

    def keep(self, experts: Iterable[tuple[int, int]]) -> None:
        self._policy.chosen = frozenset(experts)

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        self.choose(cache.slots)
        cache.preload(self.kept())

    def resize(self, budget_bytes: int) -> None:
        """Evict experts, or load more beside computing. Raises ModelError if it is too small for the mode."""
        self.require_budget(budget_bytes, self.arch, self.cache.store.folder)
        self.choose(min(budget_bytes // self.arch.expert_bytes, len(self.arch.expert_keys)))
        self.cache.resize(budget_bytes)
        self.cache.prefetch(self.kept())

    def kept(self) -> list[ExpertKey]:
        return [ExpertKey(*key) for key in sorted(self._policy.chosen)]


#: (length, count) to at most `count` windows of the training files of each task, (n, length) int64.
TrainingWindows = Callable[[int, int], Mapping[str, torch.Tensor]]


class FitProgress(Protocol):
    def __call__(self, part: str, done: int, total: int, note: str = "") -> None: ...
