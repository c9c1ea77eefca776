"""A burst of generations met by brownout, on the simulated clock of tools/moe/load.py.

How many experts a step runs at which threshold is measured: the mode answers held-out text, prefills and decode steps
of several sizes, at thresholds from 0 to 1. What the burst does to latencies is then simulated with that table.

    table = measure_accesses(runtime, mode, prompts)
    scene = scene_of(table)
    static, controlled, thresholds = burst(scene, table, 0.9 * scene.capacity_per_s, seed=1)
"""

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from experts.moe.gating import StepRow
from experts.moe.policy.salc import Phase, Salc, SalcRule
from experts.moe.policy.schedule import BatchLimits, FirstCome, StepCosts
from tools.moe.corpus import DOMAINS
from tools.moe.evaluate import HeldOutPrompt
from tools.moe.load import Effort, Machine, Outcome, Step, Task, poisson, replay

if TYPE_CHECKING:
    from experts.moe.model.runtime import MoeRuntime
    from experts.moe.modes.brownout.mode import Brownout

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
PREFILL_PROMPTS = (1, 2, 4)
DECODE_ROWS = (1, 2, 4, 8, 16)
#: The small model computes in microseconds what takes a large one a millisecond: an expert's run is made to cost one.
ACCESS_S = 1e-3
#: The load doubles after a while, and as long after that it is what it was.
CALM_S = 60.0
#: Of the latency of a request that is alone. A lone token runs k experts a layer, one of a batch waits for the union of
#: all rows' experts: an SLO on time per token that a calm batch keeps is a larger multiple.
_SLO_FACTORS: dict[Phase, float] = {"prefill": 3.0, "decode": 6.0}
#: Tokens of a prompt, steps that are decoded after it, and batches that a figure is the mean of.
_PROMPT, _DECODED, _BATCHES = 64, 4, 3


@dataclass(frozen=True, slots=True)
class AccessTable:
    """Experts that a step runs over all layers, by phase, threshold (a row of the table) and tokens (a column)."""

    thresholds: tuple[float, ...]
    tokens: Mapping[Phase, tuple[int, ...]]
    runs: Mapping[Phase, tuple[tuple[float, ...], ...]]

    def of(self, phase: Phase, threshold: float, tokens: int) -> float:
        """Between the points that were measured on straight lines, beyond them as at the last one."""
        per_threshold = [_between(self.tokens[phase], row, tokens) for row in self.runs[phase]]
        return _between(self.thresholds, per_threshold, threshold)


@torch.no_grad()
def measure_accesses(runtime: "MoeRuntime", mode: "Brownout", prompts: Sequence[HeldOutPrompt]) -> AccessTable:
    """Let the mode answer pieces of held-out prompts, several together, at every threshold. `mode` is the runtime's."""
    rows = torch.stack([each.ids[: _PROMPT + _DECODED] for each in prompts])
    tokens: dict[Phase, tuple[int, ...]] = {
        "prefill": tuple(_PROMPT * count for count in PREFILL_PROMPTS),
        "decode": DECODE_ROWS,
    }
    prefill = [_prefills(runtime, mode, rows, count) for count in PREFILL_PROMPTS]
    decode = [_decodes(runtime, mode, rows, count) for count in DECODE_ROWS]
    runs: dict[Phase, tuple[tuple[float, ...], ...]] = {
        "prefill": tuple(zip(*prefill, strict=True)),
        "decode": tuple(zip(*decode, strict=True)),
    }
    return AccessTable(THRESHOLDS, tokens, runs)


class Static:
    """Brownout at a threshold that stays. `Work` of tools/moe/load.py."""

    def __init__(self, table: AccessTable, threshold: float = 1.0) -> None:
        self._table = table
        self._threshold = threshold

    def begin(self, step: Step, now: float) -> Effort:  # noqa: ARG002  (as `Work` has it)
        return Effort(accesses=round(self._table.of(step.phase, self._threshold, step.tokens)))

    def end(self, step: Step, latencies_s: Sequence[float], now: float) -> None:
        """Nothing to learn."""


class Controlled:
    """Brownout whose threshold follows latency. `history`: seconds and thresholds, at the begin of each step."""

    def __init__(self, table: AccessTable, salc: Salc) -> None:
        self._table = table
        self._salc = salc
        self.history: list[tuple[float, dict[Phase, float]]] = []

    def begin(self, step: Step, now: float) -> Effort:
        thresholds = self._salc.check(now)
        self.history.append((now, thresholds))
        return Effort(accesses=round(self._table.of(step.phase, thresholds[step.phase], step.tokens)))

    def end(self, step: Step, latencies_s: Sequence[float], now: float) -> None:
        for latency_s in latencies_s:
            self._salc.observe(step.phase, latency_s, now)


@dataclass(frozen=True, slots=True)
class Scene:
    """Who asks for what, of which machine, how soon it must come, and what a threshold of 1 can take."""

    tasks: tuple[Task, ...]
    machine: Machine
    limits: BatchLimits
    slo_s: Mapping[Phase, float]
    #: Requests a second at which, at threshold 1, nine of ten tokens of each phase keep their SLO.
    capacity_per_s: float


def scene_of(table: AccessTable) -> Scene:
    """Five tasks of 64 tokens in and out, 16 rows, SLOs from the latencies of a request that is alone."""
    tasks = tuple(Task(domain, prompt_tokens=64, output_tokens=64) for domain in DOMAINS)
    machine = Machine(StepCosts(prefill_token_s=1e-4, step_s=2e-3, row_s=2e-4), access_s=ACCESS_S)
    alone: dict[Phase, float] = {
        "prefill": machine.compute.prefill_s(64) + ACCESS_S * table.of("prefill", 1.0, 64),
        "decode": machine.compute.decode_s(1) + ACCESS_S * table.of("decode", 1.0, 1),
    }
    slo_s: dict[Phase, float] = {phase: _SLO_FACTORS[phase] * latency_s for phase, latency_s in alone.items()}
    limits = BatchLimits(rows=16, tokens=1 << 20)
    low, high = 0.0, 10.0
    for _ in range(10):
        rate = (low + high) / 2
        calm = replay(poisson(tasks, rate, 600, seed=7), FirstCome(limits), machine, Static(table))
        kept = all(calm.violations_of(phase, each) <= 0.1 for phase, each in slo_s.items())
        low, high = (rate, high) if kept else (low, rate)
    return Scene(tasks, machine, limits, slo_s, low)


def burst(scene: Scene, table: AccessTable, rate_per_s: float, seed: int) -> tuple[Outcome, Outcome, "Controlled"]:
    """A calm minute, a minute of twice the load, calm again: at threshold 1, under SALC, and SALC with its history."""

    def rate(now: float) -> float:
        return rate_per_s * (2 if CALM_S <= now < 2 * CALM_S else 1)

    trace = poisson(scene.tasks, rate, round(rate_per_s * 5 * CALM_S), seed)
    static = replay(trace, FirstCome(scene.limits), scene.machine, Static(table))
    salc = Salc(SalcRule(slo_s=scene.slo_s["prefill"]), SalcRule(slo_s=scene.slo_s["decode"]))
    controlled = Controlled(table, salc)
    return static, replay(trace, FirstCome(scene.limits), scene.machine, controlled), controlled


def _prefills(runtime: "MoeRuntime", mode: "Brownout", rows: torch.Tensor, count: int) -> list[float]:
    """Experts run by a prefill of `count` prompts, at each threshold."""
    runs: list[float] = []
    for threshold in THRESHOLDS:
        mode.thresholds = {"prefill": threshold, "decode": threshold}
        mode.forget()
        batches = rows[:, :_PROMPT].split(count)[:_BATCHES]
        for batch in batches:
            _forward(runtime, batch, None)
        runs.append((mode.accesses["prefill"].originals + mode.accesses["prefill"].united) / len(batches))
    return runs


def _decodes(runtime: "MoeRuntime", mode: "Brownout", rows: torch.Tensor, count: int) -> list[float]:
    """Experts run by a decode step of `count` rows, at each threshold."""
    runs = [0.0] * len(THRESHOLDS)
    batches = rows.split(count)[:_BATCHES]
    for batch in batches:
        mode.thresholds = {"prefill": 1.0, "decode": 1.0}
        past = _forward(runtime, batch[:, :_PROMPT], None)
        for place, threshold in enumerate(THRESHOLDS):
            mode.thresholds = {"prefill": 1.0, "decode": threshold}
            mode.forget()
            behind = copy.deepcopy(past)
            for at in range(_PROMPT, _PROMPT + _DECODED):
                behind = _forward(runtime, batch[:, at : at + 1], behind)
            runs[place] += mode.accesses["decode"].originals + mode.accesses["decode"].united
    return [each / len(batches) / _DECODED for each in runs]


def _forward(runtime: "MoeRuntime", ids: torch.Tensor, past: object) -> object:
    with runtime.step([StepRow(f"burst-{row}", None, ids.shape[1]) for row in range(len(ids))]):
        return runtime.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).past_key_values


def _between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    upper = bisect_right(places, at)
    if upper == 0:
        return values[0]
    if upper == len(places):
        return values[-1]
    part = (at - places[upper - 1]) / (places[upper] - places[upper - 1])
    return values[upper - 1] + part * (values[upper] - values[upper - 1])
