"""Brownout: under load the busiest experts run themselves, the tokens of the others go to united experts.

BrownoutServe §IV. At threshold 1 nothing changes, to the bit. The threshold of a phase is set from outside, or follows
the latencies that are reported (`observe`) by SALC. United experts stay in memory, within the model's budget.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertIterator, ForwardStep, Routing
from experts.moe.model.mode import BaseMode
from experts.moe.modes.brownout.united import WAYS, UnitedExperts, load_united
from experts.moe.policy.brownout import ExpertSplit, split
from experts.moe.policy.salc import Phase, Salc, SalcRule
from experts.moe.weights.prepared import PreparedFiles

_OPTIONS: dict[str, Any] = {"way": 4, "threshold": 1.0, "ttft_slo_ms": None, "tpot_slo_ms": None}


@dataclass(slots=True)
class ExpertAccesses:
    """Experts run over all layers and steps of a phase, and what became of the tokens that chose them."""

    #: Experts that the gates asked for: what would have run at threshold 1.
    asked: int = 0
    originals: int = 0
    united: int = 0
    #: Choices (k of each token and layer) in all, answered by a united expert, and ignored.
    choices: int = 0
    choices_united: int = 0
    choices_dropped: int = 0

    @property
    def share(self) -> float:
        """Experts run, of those asked for."""
        return (self.originals + self.united) / self.asked if self.asked else 1.0

    def add(self, tokens: list[int], done: ExpertSplit) -> None:
        self.asked += sum(count > 0 for count in tokens)
        self.originals += len(done.originals)
        self.united += len(done.united)
        self.choices += sum(tokens)
        self.choices_united += sum(tokens[expert] for _, members in done.united for expert in members)
        self.choices_dropped += sum(tokens[expert] for expert in done.dropped)


class Brownout(BaseMode):
    name = "brownout"
    #: Only at threshold 1.
    lossless = False
    ahead = True

    def __init__(
        self,
        united: UnitedExperts | None,
        *,
        threshold: float = 1.0,
        salc: Salc | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without united experts this is full brownout. `salc` sets both thresholds anew before each step."""
        super().__init__()
        self.thresholds: dict[Phase, float] = {"prefill": threshold, "decode": threshold}
        self.accesses: dict[Phase, ExpertAccesses] = {}
        self.salc = salc
        self._united = united
        self._clock = clock
        self.forget()

    @classmethod
    def open(cls, checkpoint: Path, options: Mapping[str, Any]) -> "Brownout":
        """With the united experts that `coserve moe unite` made. Raises ModelError where they are missing.

        Options: `way` 2, 4 (default) or 8, 0 for full brownout; `threshold`, 1 by default; or, for a threshold that
        follows the load, `ttft_slo_ms` and `tpot_slo_ms`.
        """
        asked = {**_OPTIONS, **options}
        unknown = next((each for each in asked if each not in _OPTIONS), None)
        if unknown is not None:
            raise ModelError(checkpoint, f"brownout has no option {unknown!r}; expected {', '.join(_OPTIONS)}")
        way, threshold = asked["way"], asked["threshold"]
        if way not in (0, *WAYS):
            raise ModelError(
                checkpoint, f"brownout: way is {way!r}; expected {', '.join(map(str, WAYS))}, or 0 for none"
            )
        if not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
            raise ModelError(checkpoint, f"brownout: threshold is {threshold!r}; expected a number from 0 to 1")
        slos_ms = (asked["ttft_slo_ms"], asked["tpot_slo_ms"])
        salc = None
        if slos_ms != (None, None):
            if not all(isinstance(each, int | float) and each > 0 for each in slos_ms):
                raise ModelError(checkpoint, "brownout: give ttft_slo_ms and tpot_slo_ms, both in milliseconds")
            salc = Salc(*(SalcRule(slo_s=each / 1000) for each in slos_ms))
        return cls(load_united(PreparedFiles(checkpoint), way) if way else None, threshold=float(threshold), salc=salc)

    @property
    def reserved_bytes(self) -> int:
        """Of the model's budget, what the united experts hold."""
        return 0 if self._united is None else self._united.weights_bytes

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        if self._united is not None:
            _require_fit(self._united, arch, cache.store.folder)

    def require(self, budget_bytes: int, arch: MoeArch, folder: Path) -> None:
        if budget_bytes - self.reserved_bytes < arch.expert_bytes:
            message = f"a budget of {budget_bytes} bytes holds no expert beside {self.reserved_bytes} of united ones"
            raise ModelError(folder, f"{message}; raise it, or unite more experts in one (way)")

    def resize(self, budget_bytes: int) -> None:
        self.require(budget_bytes, self.arch, self.cache.store.folder)
        self.cache.resize(budget_bytes - self.reserved_bytes)

    def forget(self) -> None:
        """Count accesses from 0."""
        self.accesses = {"prefill": ExpertAccesses(), "decode": ExpertAccesses()}

    def observe(self, phase: Phase, latency_s: float) -> None:
        """A request's first token (since its arrival), or a further one (since the one before), took so long."""
        if self.salc is not None:
            self.salc.observe(phase, latency_s, self._clock())

    def begin(self, step: ForwardStep) -> None:
        super().begin(step)
        if self.salc is not None:
            self.thresholds = self.salc.check(self._clock())

    def route(self, routing: Routing) -> Routing:
        experts = self.arch.experts
        counted = torch.bincount(routing.index.flatten(), minlength=experts + 1)
        tokens: list[int] = counted[:experts].tolist()
        groups = None if self._united is None else self._united.groups[routing.layer]
        done = split(tokens, self.thresholds[self.step.phase], groups)
        self.accesses[self.step.phase].add(tokens, done)
        if not done.united and not done.dropped:
            return routing
        return self._redirect(routing, done)

    def experts(self, routing: Routing) -> ExpertIterator:
        sentinel, united = self.arch.experts, self._united
        wanted = routing.wanted()
        yield from self.cache.serve(routing.layer, [each for each in wanted if each < sentinel], ahead=self.ahead)
        stand_ins = [each for each in wanted if each > sentinel]
        if united is None or not stand_ins:
            return
        if united.device != routing.hidden.device:
            self._united = united = united.to(routing.hidden.device)
        for each in stand_ins:
            yield each, united.weights(routing.layer, each - sentinel - 1)

    def _redirect(self, routing: Routing, done: ExpertSplit) -> Routing:
        """Each choice by its expert's new number: E, the sentinel, where it is ignored, E + 1 + g for group g."""
        sentinel = self.arch.experts
        numbers = list(range(sentinel + 1))
        for expert in done.dropped:
            numbers[expert] = sentinel
        for group, members in done.united:
            for expert in members:
                numbers[expert] = sentinel + 1 + group
        index = torch.tensor(numbers, device=routing.index.device)[routing.index]
        return replace(routing, index=index)


def _require_fit(united: UnitedExperts, arch: MoeArch, folder: Path) -> None:
    rows, hidden = arch.gate_up_shape
    fits = len(united.groups) == arch.layers and all(
        each.shape[1:] == (rows, hidden) and len(groups) == arch.experts
        for each, groups in zip(united.gate_up, united.groups, strict=True)
    )
    if not fits:
        message = f"{arch.layers} layers of {arch.experts} experts of {rows} × {hidden}"
        raise ModelError(folder, f"united experts do not fit {message}; make them again with `coserve moe unite`")
