"""A burst of generations under brownout, on the simulated clock of tests/moe/load.py.

How many experts a step runs at which threshold is measured: the mode answers held-out text, in prefills and decode
steps of several sizes, at thresholds from 0 to 1. Latencies in the burst are then simulated with that table.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from experts.moe.gating import StepRow
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes.brownout.mode import Brownout
from experts.moe.policy.brownout import Phase, Salc, SalcRule
from experts.moe.policy.schedule import BatchLimits, FirstCome, StepCosts
from tests.moe.evaluate import HeldOutPrompt
from tests.moe.load import (
    Effort,
    LoadOutcome,
    ModeCosts,
    SimulatedMachine,
    SimulatedStep,
    TextArrival,
    TextTask,
    poisson,
    replay,
)
from tools.moe.corpus import DOMAINS

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
PREFILL_PROMPTS = (1, 2, 4)
DECODE_ROWS = (1, 2, 4, 8, 16)
#: A large model computes for a millisecond per expert, the small one for microseconds: here a run costs a millisecond.
ACCESS_S = 1e-3
#: Seconds before the load doubles, and of the doubled load.
CALM_S = 60.0
#: SLOs as multiples of the latency of a request that is alone. A lone token runs k experts a layer, a batch waits for
#: the union of all rows' experts: an SLO on time per token that a calm batch keeps is a larger multiple.
_SLO_FACTORS: dict[Phase, float] = {"prefill": 3.0, "decode": 6.0}
_TASKS = tuple(TextTask(domain, prompt_tokens=64, output_tokens=64) for domain in DOMAINS)
_LIMITS = BatchLimits(rows=16, tokens=1 << 20)
#: Tokens of a prompt, decode steps after it, and batches that a figure averages.
_PROMPT, _DECODED, _BATCHES = 64, 4, 3


@dataclass(frozen=True, slots=True)
class AccessTable:
    """Experts that a step runs over all layers, by phase, threshold (a row of the table) and tokens (a column)."""

    thresholds: tuple[float, ...]
    tokens: Mapping[Phase, tuple[int, ...]]
    runs: Mapping[Phase, tuple[tuple[float, ...], ...]]

    def accesses(self, step: SimulatedStep, threshold: float) -> int:
        """Interpolate between measured points; beyond them the last one counts."""
        by_threshold = [np.interp(step.tokens, self.tokens[step.phase], row) for row in self.runs[step.phase]]
        return round(float(np.interp(threshold, self.thresholds, by_threshold)))


@torch.no_grad()
def measure_accesses(runtime: MoeRuntime, mode: Brownout, prompts: Sequence[HeldOutPrompt]) -> AccessTable:
    """Let the mode answer pieces of held-out prompts, several together, at every threshold. `mode` is the runtime's."""
    rows = torch.stack([prompt.ids[: _PROMPT + _DECODED] for prompt in prompts])
    prefill = [_prefills(runtime, mode, rows, count) for count in PREFILL_PROMPTS]
    decode = [_decodes(runtime, mode, rows, count) for count in DECODE_ROWS]
    tokens: dict[Phase, tuple[int, ...]] = {
        "prefill": tuple(_PROMPT * count for count in PREFILL_PROMPTS),
        "decode": DECODE_ROWS,
    }
    runs: dict[Phase, tuple[tuple[float, ...], ...]] = {
        "prefill": tuple(zip(*prefill, strict=True)),
        "decode": tuple(zip(*decode, strict=True)),
    }
    return AccessTable(THRESHOLDS, tokens, runs)


class StaticThreshold(ModeCosts):
    """Brownout at a constant threshold."""

    def __init__(self, table: AccessTable, threshold: float = 1.0) -> None:
        self._table = table
        self._threshold = threshold

    def begin(self, step: SimulatedStep, now: float) -> Effort:
        return Effort(accesses=self._table.accesses(step, self._threshold))


class ControlledThreshold(ModeCosts):
    """Brownout whose threshold follows latency. `history`: seconds and thresholds at the begin of each step."""

    def __init__(self, table: AccessTable, slo_s: Mapping[Phase, float]) -> None:
        self._table = table
        self._salc = Salc(SalcRule(slo_s=slo_s["prefill"]), SalcRule(slo_s=slo_s["decode"]))
        self.history: list[tuple[float, dict[Phase, float]]] = []

    def begin(self, step: SimulatedStep, now: float) -> Effort:
        thresholds = self._salc.check(now)
        self.history.append((now, thresholds))
        return Effort(accesses=self._table.accesses(step, thresholds[step.phase]))

    def end(self, step: SimulatedStep, latencies_s: Sequence[float], now: float) -> None:
        for latency_s in latencies_s:
            self._salc.observe(step.phase, latency_s, now)


@dataclass(frozen=True, slots=True)
class BurstScene:
    """Five tasks of 64 tokens in and out on one machine, their SLOs, and the capacity of threshold 1."""

    machine: SimulatedMachine
    slo_s: Mapping[Phase, float]
    #: Requests a second at which, at threshold 1, nine of ten tokens of each phase keep their SLO.
    capacity_per_s: float
    tasks: tuple[TextTask, ...] = _TASKS
    limits: BatchLimits = _LIMITS

    def replay(self, trace: Sequence[TextArrival], mode: ModeCosts) -> LoadOutcome:
        return replay(trace, FirstCome(self.limits), self.machine, mode)


def scene_of(table: AccessTable) -> BurstScene:
    """Derive SLOs from the latencies of a request that is alone, and search the capacity."""
    machine = SimulatedMachine(StepCosts(prefill_token_s=1e-4, step_s=2e-3, row_s=2e-4), access_s=ACCESS_S)
    alone_s: dict[Phase, float] = {
        "prefill": machine.compute.prefill_s(64) + ACCESS_S * table.runs["prefill"][-1][0],
        "decode": machine.compute.decode_s(1) + ACCESS_S * table.runs["decode"][-1][0],
    }
    slo_s: dict[Phase, float] = {phase: _SLO_FACTORS[phase] * latency_s for phase, latency_s in alone_s.items()}
    low, high = 0.0, 10.0
    for _ in range(10):
        scene = BurstScene(machine, slo_s, (low + high) / 2)
        calm = scene.replay(poisson(scene.tasks, scene.capacity_per_s, 600, seed=7), StaticThreshold(table))
        is_kept = all(calm.violations_of(phase, slo) <= 0.1 for phase, slo in slo_s.items())
        low, high = (scene.capacity_per_s, high) if is_kept else (low, scene.capacity_per_s)
    return BurstScene(machine, slo_s, low)


def burst(
    scene: BurstScene, table: AccessTable, rate_per_s: float, seed: int
) -> tuple[LoadOutcome, LoadOutcome, ControlledThreshold]:
    """Replay a calm minute, a minute of double load, and calm again: at threshold 1, and under SALC."""

    def rate(now: float) -> float:
        return rate_per_s * (2 if CALM_S <= now < 2 * CALM_S else 1)

    trace = poisson(scene.tasks, rate, round(rate_per_s * 5 * CALM_S), seed)
    controlled = ControlledThreshold(table, scene.slo_s)
    return scene.replay(trace, StaticThreshold(table)), scene.replay(trace, controlled), controlled


def _prefills(runtime: MoeRuntime, mode: Brownout, rows: torch.Tensor, count: int) -> list[float]:
    """Count the experts run by a prefill of `count` prompts at each threshold."""
    runs: list[float] = []
    for threshold in THRESHOLDS:
        mode.thresholds = {"prefill": threshold, "decode": threshold}
        mode.reset_accesses()
        batches = rows[:, :_PROMPT].split(count)[:_BATCHES]
        for batch in batches:
            _forward(runtime, batch, None)
        runs.append((mode.accesses["prefill"].originals + mode.accesses["prefill"].united) / len(batches))
    return runs


def _decodes(runtime: MoeRuntime, mode: Brownout, rows: torch.Tensor, count: int) -> list[float]:
    """Count the experts run by a decode step of `count` rows at each threshold."""
    runs = [0.0] * len(THRESHOLDS)
    batches = rows.split(count)[:_BATCHES]
    for batch in batches:
        mode.thresholds = {"prefill": 1.0, "decode": 1.0}
        prompt = _forward(runtime, batch[:, :_PROMPT], None)
        for place, threshold in enumerate(THRESHOLDS):
            mode.thresholds = {"prefill": 1.0, "decode": threshold}
            mode.reset_accesses()
            past = copy.deepcopy(prompt)
            for at in range(_PROMPT, _PROMPT + _DECODED):
                past = _forward(runtime, batch[:, at : at + 1], past)
            runs[place] += mode.accesses["decode"].originals + mode.accesses["decode"].united
    return [count / len(batches) / _DECODED for count in runs]


def _forward(runtime: MoeRuntime, ids: torch.Tensor, past: Any) -> Any:
    with runtime.step([StepRow(f"burst-{row}", None, ids.shape[1]) for row in range(len(ids))]):
        return runtime.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).past_key_values
