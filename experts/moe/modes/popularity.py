"""The most popular experts of each layer stay in memory; the others pass through one slot when they are wanted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey, Routing
from experts.moe.model.mode import BaseMode
from experts.moe.policy.eviction import MostPopular
from experts.moe.trace import load_popularity
from experts.moe.weights.prepared import PreparedFiles


class Popularity(BaseMode):
    """`shares`: (L, E), what part of a layer's tokens goes to each expert, counted on training text.

    As a prediction: every token takes its layer's most popular experts.
    """

    name = "popularity"
    #: Slots that the unpopular pass through.
    transit = 1

    def __init__(self, shares: torch.Tensor) -> None:
        super().__init__()
        self._ranking = shares.argsort(dim=-1, descending=True, stable=True)

    @classmethod
    def open(cls, checkpoint: Path, _options: Mapping[str, Any]) -> "Popularity":
        """From what `coserve moe trace` counted. Raises ModelError where that is missing."""
        return cls(load_popularity(PreparedFiles(checkpoint))[0])

    def residency(self, arch: MoeArch) -> MostPopular:
        if self._ranking.shape != (arch.layers, arch.experts):
            raise ValueError(
                f"shares of {tuple(self._ranking.shape)} experts, the model has {arch.layers, arch.experts}"
            )
        self._policy = MostPopular(self._ranking.tolist(), self.transit)
        return self._policy

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        self.require(cache.budget_bytes, arch, cache.store.folder)
        cache.fill(self._kept())

    def route(self, routing: Routing) -> Routing:
        predictions = self.cache.metrics.predictions
        predictions.predict(routing.layer, self._ranking[routing.layer, : self.arch.top_k].to(routing.index.device))
        predictions.check(routing)
        return routing

    def resize(self, budget_bytes: int) -> None:
        self.require(budget_bytes, self.arch, self.cache.store.folder)
        self.cache.resize(budget_bytes)
        self.cache.prefetch(self._kept())

    def _kept(self) -> list[ExpertKey]:
        return [ExpertKey(*key) for key in self._policy.kept]

    def require(self, budget_bytes: int, arch: MoeArch, folder: Path) -> None:
        """Popular experts need a slot beside the others'; raises ModelError where there is only one."""
        need_bytes = self.least_experts(arch) * arch.expert_bytes
        if budget_bytes < need_bytes:
            message = f"mode {self.name} needs at least {need_bytes} bytes for experts, and has {budget_bytes}"
            raise ModelError(folder, f"{message}; raise the model's budget or choose another mode")

    def least_experts(self, arch: MoeArch) -> int:  # noqa: ARG002
        """Experts that must fit."""
        return self.transit + 1
