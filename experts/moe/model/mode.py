"""What a mode of serving is: who computes which token with which expert, and which experts are in memory for it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.gating import ExpertIterator, ForwardStep, Routing
from experts.moe.policy.eviction import EvictionPolicy, LayeredLru

#: One layer's gate without its choice: (T, H) to logits (T, E).
Gate = Callable[[torch.Tensor], torch.Tensor]


class Mode(Protocol):
    """One object for each model in service. The runtime calls it from the one thread that computes.

    In this order: `residency`, `attach` once; then for each step `begin`, for each layer `route` and `experts`, and
    `end`, also where the step failed.
    """

    name: str
    #: Whether the answers are those of the unmodified model, to the bit.
    lossless: bool

    @property
    def reserved_bytes(self) -> int:
        """What it holds of the model's budget itself; slots have the rest."""
        ...

    #: One for each layer, given by the runtime before `attach`.
    gates: Sequence[Gate]

    def require(self, budget_bytes: int, arch: MoeArch, folder: Path) -> None:
        """Raise ModelError where the mode needs more than every mode does (`runtime.require_budget`)."""
        ...

    def residency(self, arch: MoeArch) -> EvictionPolicy:
        """The policy of the cache that is made for this mode."""
        ...

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        """The cache is there; what is to be in memory from the start is loaded now. Raises ModelError."""
        ...

    def begin(self, step: ForwardStep) -> None: ...

    def route(self, routing: Routing) -> Routing:
        """What is to be carried out; a lossless mode returns the routing as it is."""
        ...

    def experts(self, routing: Routing) -> ExpertIterator:
        """The weights for a routing that `route` returned. Raises ModelError."""
        ...

    def end(self, step: ForwardStep) -> None: ...

    def resize(self, budget_bytes: int) -> None:
        """Another budget while serving. Raises ModelError where the mode cannot work with so little."""
        ...

    def close(self) -> None: ...


class BaseMode:
    """What most modes share: slots evicted by last use, everything wanted is served as the gate said."""

    name = ""
    lossless = True
    #: Whether the next expert is fetched while one is computed.
    ahead = False

    @property
    def reserved_bytes(self) -> int:
        return 0

    def __init__(self) -> None:
        self.gates: Sequence[Gate] = ()

    def require(self, budget_bytes: int, arch: MoeArch, folder: Path) -> None:
        """What every mode needs is enough."""

    def residency(self, arch: MoeArch) -> EvictionPolicy:
        return LayeredLru(arch.layers)

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        self.cache = cache
        self.arch = arch

    def begin(self, step: ForwardStep) -> None:
        self.step = step

    def route(self, routing: Routing) -> Routing:
        return routing

    def experts(self, routing: Routing) -> ExpertIterator:
        return self.cache.serve(routing.layer, routing.wanted(), ahead=self.ahead)

    def end(self, step: ForwardStep) -> None:
        pass

    def resize(self, budget_bytes: int) -> None:
        self.cache.resize(budget_bytes)

    def close(self) -> None:
        pass
