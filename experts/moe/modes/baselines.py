"""The baselines: everything in memory, loading on demand, prediction without training, and two by popularity."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.gating import ExpertIterator, ExpertKey, Routing
from experts.moe.model.mode import KeepingMode, Mode
from experts.moe.policy.eviction import split_evenly
from experts.moe.trace import load_popularity
from experts.moe.weights.prepared import PreparedFiles


class Resident(Mode):
    """Keeps all experts in memory from the start: the oracle for all other modes."""

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        cache.preload(arch.expert_keys)

    def min_slots(self, arch: MoeArch) -> int:
        return len(arch.expert_keys)


class OnDemand(Mode):
    """Loads an expert when the gate has chosen it, and computing waits: serving without prediction."""


class Lookahead(Mode):
    """Prefetches what the next layer's gate would choose for this layer's input, as hidden states change little."""

    def route(self, routing: Routing) -> Routing:
        following, self._wanted = routing.layer + 1, list[ExpertKey]()
        self.cache.cancel(routing.layer)  # the gate has chosen: missing experts are loaded as demands
        if following < self.arch.layers:
            guess = torch.topk(self.gates[following](routing.hidden), self.arch.top_k, dim=-1).indices
            self._wanted = self._most_wanted(following, guess, routing.index)
        return routing

    def experts(self, routing: Routing) -> ExpertIterator:
        """Serve the layer, and prefetch for the next one as soon as this one waits for nothing more."""
        experts = routing.distinct_experts()
        missing = set(experts).difference(self.cache.resident(routing.layer))
        for expert, weights in self.cache.serve(routing.layer, experts, ahead=self.load_ahead):
            missing.discard(expert)
            if not missing and self._wanted:
                self.cache.prefetch(self._wanted)
                self._wanted = []
            yield expert, weights

    def _most_wanted(self, layer: int, guess: torch.Tensor, index: torch.Tensor) -> list[ExpertKey]:
        """Return the experts guessed for most tokens, as many as the layer has slots; padding does not count."""
        rows = zip(guess.tolist(), index.tolist(), strict=True)
        counts = Counter(expert for guessed, taken in rows if min(taken) < self.arch.experts for expert in guessed)
        layer_slots = max(1, self.cache.slots // self.arch.layers)
        return [ExpertKey(layer, expert) for expert, _ in counts.most_common(layer_slots)]


class Popularity(KeepingMode):
    """Keeps the most popular experts of each layer by `shares` (L, E) of tokens; the others pass through one slot."""

    #: Slots for the unpopular experts.
    transit = 1

    def __init__(self, shares: torch.Tensor) -> None:
        super().__init__()
        self._ranking = shares.argsort(dim=-1, descending=True, stable=True)

    @classmethod
    def open(cls, checkpoint: Path, options: Any) -> "Popularity":  # noqa: ARG003  there are none
        return cls(load_popularity(PreparedFiles(checkpoint)))

    def min_slots(self, arch: MoeArch) -> int:
        return max(super().min_slots(arch), self.transit + 1)

    def choose(self, slots: int) -> None:
        staying = slots if slots >= len(self.arch.expert_keys) else slots - self.transit
        counts = split_evenly(staying, self.arch.layers)
        rankings = enumerate(self._ranking.tolist())
        self.keep((layer, expert) for layer, ranking in rankings for expert in ranking[: counts[layer]])


class Prune(Popularity):
    """Static pruning: only the most popular experts exist, by budget alone; gates choose among them as in SwapMoE."""

    lossless = False
    transit = 0

    def route(self, routing: Routing) -> Routing:
        return self.among_residents(routing)
