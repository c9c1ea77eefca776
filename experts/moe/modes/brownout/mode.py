"""Brownout: under load the busiest experts run themselves, and united experts answer the tokens of the others.

BrownoutServe §IV. At threshold 1 nothing changes, to the bit. Each phase's threshold is set from outside, or SALC
derives it from reported latencies (`observe`). United experts stay in memory, within the model's budget.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, PositiveFloat, model_validator

from experts.moe.arch import MoeArch
from experts.moe.gating import ExpertIterator, ForwardStep, Routing
from experts.moe.model.mode import Mode, ModeOptions
from experts.moe.modes.brownout.united import UnitedExperts, load_united
from experts.moe.policy.brownout import LatencyController, Phase, redirect
from experts.moe.weights.prepared import PreparedFiles


class BrownoutOptions(ModeOptions, frozen=True):
    """`way` 0 is full brownout. The two SLOs, given together, make the threshold follow the latency."""

    way: Literal[0, 2, 4, 8] = 4
    threshold: Annotated[float, Field(ge=0, le=1)] = 1.0
    ttft_slo_ms: PositiveFloat | None = None
    tpot_slo_ms: PositiveFloat | None = None

    @model_validator(mode="after")
    def _both_slos(self) -> Self:
        if (self.ttft_slo_ms is None) != (self.tpot_slo_ms is None):
            raise ValueError("give ttft_slo_ms and tpot_slo_ms, both in milliseconds")
        return self


class Brownout(Mode):
    """Without united experts this is full brownout. With SLOs, SALC sets both thresholds before each step."""

    Options = BrownoutOptions
    #: Lossless at threshold 1 only.
    lossless = False
    load_ahead = True

    def __init__(self, united: UnitedExperts | None, options: BrownoutOptions) -> None:
        super().__init__()
        slos: dict[Phase, float | None] = {"prefill": options.ttft_slo_ms, "decode": options.tpot_slo_ms}
        self.thresholds = dict.fromkeys(slos, options.threshold)
        self._salc = {phase: LatencyController(slo_ms / 1000) for phase, slo_ms in slos.items() if slo_ms}
        self._united = united

    @classmethod
    def open(cls, checkpoint: Path, options: BrownoutOptions) -> "Brownout":
        return cls(load_united(PreparedFiles(checkpoint), options.way) if options.way else None, options)

    @property
    def reserved_bytes(self) -> int:
        return 0 if self._united is None else self._united.weights_bytes

    def min_slots(self, arch: MoeArch) -> int:
        return min(arch.top_k, arch.layers)

    def observe(self, phase: Phase, latency_s: float) -> None:
        """Report the latency of a request's first token (since arrival) or of a later one (since the last)."""
        if self._salc:
            self._salc[phase].observe(latency_s, time.monotonic())

    def begin(self, step: ForwardStep) -> None:
        super().begin(step)
        self.thresholds |= {phase: controller.check(time.monotonic()) for phase, controller in self._salc.items()}

    def route(self, routing: Routing) -> Routing:
        experts = self.arch.experts
        tokens: list[int] = torch.bincount(routing.index.flatten(), minlength=experts + 1)[:experts].tolist()
        groups = None if self._united is None else self._united.groups[routing.layer]
        numbers = redirect(tokens, self.thresholds[self.step.phase], groups)
        if numbers == [*range(experts + 1)]:
            return routing
        return replace(routing, index=torch.tensor(numbers, device=routing.index.device)[routing.index])

    def experts(self, routing: Routing) -> ExpertIterator:
        sentinel, united = self.arch.experts, self._united
        experts = routing.distinct_experts()
        originals = [expert for expert in experts if expert < sentinel]
        yield from self.cache.serve(routing.layer, originals, ahead=self.load_ahead)
        numbers = [expert for expert in experts if expert > sentinel]
        if united is None or not numbers:
            return
        if united.device != routing.hidden.device:
            self._united = united = united.to(routing.hidden.device)
        for number in numbers:
            yield number, united.weights(routing.layer, number - sentinel - 1)
