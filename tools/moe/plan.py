"""`coserve moe plan`: SwapMoE's planner for a memory budget."""

import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch

from daemon.units import parse_bytes
from experts.moe.arch import MoeArch
from experts.moe.errors import ModelError
from experts.moe.gating import ForwardStep, Routing
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes.baselines import OnDemand
from experts.moe.modes.swapmoe.mode import SwapMoe, SwapMoeOptions, expert_norms, importance
from experts.moe.modes.swapmoe.planner import (
    Configuration,
    LossModel,
    MeasuredPlan,
    MemoryPlan,
    Preparation,
    load_preparation,
    plan_counts,
    random_counts,
    save_preparation,
)
from experts.moe.policy.eviction import split_evenly
from experts.moe.weights.prepared import PreparedFiles
from tools.moe.checkpoint import arch_of, progress_bars
from tools.moe.trace import TRAIN, load_text
from tools.terminal.console import console

#: Update cycles that are tried, from the highest frequency to the lowest (§3.5.1).
_PERIODS = (1, 2, 4, 8, 16, 32)
#: Searches; each learns from the measurement of the one before.
_ROUNDS = 8
_MEASURED = "plan-measured"


@dataclass(frozen=True, slots=True)
class PlanProfile:
    """The text that configurations are measured on: windows of the training files, domain after domain.

    The first half of `length` tokens is a prompt; the others come `chunk` in a step, as quick as prefill, and swap
    experts as decoding would.
    """

    of_domain: int = 6
    length: int = 192
    chunk: int = 8


class Planner:
    """Plans one budget of one checkpoint; measurements are saved and not repeated. Raises ModelError."""

    def __init__(self, checkpoint: Path, budget: str, profile: PlanProfile) -> None:
        self._prepared = PreparedFiles(checkpoint)
        self._profile = profile
        self._arch = arch_of(checkpoint)
        slots = _slots(self._arch, budget, checkpoint)
        self.budget_bytes = slots * self._arch.expert_bytes
        #: Slots of experts that stay; one is for the expert that is swapped in.
        self._slots = slots if slots == len(self._arch.expert_keys) else slots - 1
        text = load_text(self._prepared, TRAIN)
        # Domain after domain: text has a subject and keeps to it (§2.4).
        self._windows = [row for domain in text.ids for row in text.windows(domain, profile.length, profile.of_domain)]
        self._preparation = load_preparation(checkpoint) or self._prepare()
        self._measured = self._load_measured()
        self.even = split_evenly(self._slots, self._arch.layers)

    def run(self, configurations: int) -> MemoryPlan:
        period = self._period()
        drawn = random_counts(self._arch.layers, self._arch.experts, self._arch.top_k, self._slots, configurations)
        with progress_bars() as progress:
            for number, counts in enumerate(drawn, 1):
                self.measured(counts, period)
                progress("configurations", number, len(drawn))
        for _ in range(_ROUNDS):
            try:
                best = self._search(period, drawn)
            except ValueError:
                break  # every configuration within the budget is measured
            drawn = (*drawn, best)
            self.measured(best, period)
        fits = [self.measured(counts, period) for counts in drawn if sum(counts) <= self._slots]
        plan = MemoryPlan(self.budget_bytes, min(fits, key=lambda measured: measured.loss).counts, period)
        others = [each for each in self._preparation.plans if each.budget_bytes != self.budget_bytes]
        save_preparation(self._prepared, replace(self._preparation, plans=(*others, plan)))
        return plan

    def measured(self, counts: Configuration, period: int) -> MeasuredPlan:
        """Return a configuration's measurement, taken now unless it is saved."""
        key = f"{'-'.join(map(str, counts))}@{period}"
        if key not in self._measured:
            self._measured[key], _, _ = self._serve(counts, period, self._windows)
            table = {name: asdict(measured) for name, measured in self._measured.items()}
            self._prepared.save(_MEASURED, {}, {"profile": asdict(self._profile), "measured": table})
        return self._measured[key]

    def _period(self) -> int:
        """Return the shortest update cycle whose loads fit into its steps, else the longest (§3.5.1)."""
        _, load_ms, step_ms = self._serve(self.even, self._arch.layers, self._windows[:4])
        with progress_bars() as progress:
            for number, period in enumerate(_PERIODS, 1):
                self.measured(self.even, period)
                progress("update frequencies", number, len(_PERIODS))
        fits = [period for period in _PERIODS if self.measured(self.even, period).loads * load_ms <= step_ms]
        return fits[0] if fits else _PERIODS[-1]

    def _search(self, period: int, drawn: Sequence[Configuration]) -> Configuration:
        measured = [self.measured(counts, period) for counts in drawn]
        model = LossModel(measured, self._arch.experts)
        return plan_counts(model, measured, self._slots, experts=self._arch.experts, floor=self._arch.top_k)

    def _prepare(self) -> Preparation:
        """Measure the norms of all experts, and Eq. 2 on the profile with every expert taking part."""
        with closing(MoeRuntime.open(self._prepared.checkpoint, OnDemand(), self.budget_bytes)) as runtime:
            with console.status("norms of all experts"):
                norms = expert_norms(runtime.store)
            sums = torch.zeros_like(norms)

            def add_importance(_step: ForwardStep, gate: Routing, _carried_out: Routing) -> None:
                sums[gate.layer] += importance(gate, norms[gate.layer])

            runtime.observers.append(add_importance)
            with progress_bars() as progress, torch.no_grad():
                for number, window in enumerate(self._windows, 1):
                    runtime.model(window[None], use_cache=False, logits_to_keep=1)
                    progress("importance", number, len(self._windows))
        preparation = Preparation(norms, sums)
        save_preparation(self._prepared, preparation)
        return preparation

    def _serve(
        self, counts: Configuration, period: int, windows: Sequence[torch.Tensor]
    ) -> tuple[MeasuredPlan, float, float]:
        """Open the model with a configuration and pass over the windows; return ms of a load and of a step, too."""
        mode = SwapMoe(self._preparation, SwapMoeOptions(counts=counts, period=period))
        size_bytes = (sum(counts) + 1) * self._arch.expert_bytes
        with closing(MoeRuntime.open(self._prepared.checkpoint, mode, size_bytes)) as runtime:
            loss, loads, load_ms, step_ms = _pass(runtime, windows, self._profile)
        return MeasuredPlan(counts, period, loss, loads), load_ms, step_ms

    def _load_measured(self) -> dict[str, MeasuredPlan]:
        with suppress(ModelError):
            _, saved = self._prepared.load(_MEASURED)
            if saved["profile"] == asdict(self._profile):
                rows = saved["measured"].items()
                return {key: MeasuredPlan(**row | {"counts": tuple(row["counts"])}) for key, row in rows}
        return {}


def _slots(arch: MoeArch, budget: str, checkpoint: Path) -> int:
    """Return how many experts a budget holds. Raises ModelError if it is no size, or too small for the mode."""
    experts = len(arch.expert_keys)
    try:
        if budget.endswith("%"):
            slots = int(float(budget.removesuffix("%")) / 100 * experts + 1e-9)
        else:
            slots = parse_bytes(budget) // arch.expert_bytes
    except ValueError as error:
        raise ModelError(checkpoint, f"{budget!r} is not a budget: give a size, 600MiB, or a part, 50%") from error
    SwapMoe().require_budget(slots * arch.expert_bytes, arch, checkpoint)
    return min(slots, experts)


def _pass(
    runtime: MoeRuntime, windows: Sequence[torch.Tensor], profile: PlanProfile
) -> tuple[float, float, float, float]:
    """Run the windows, awaiting swaps after each step; return loss, loads of a step, ms of a load and of a step."""
    lost, tokens, step_ms = 0.0, 0, list[float]()
    before = runtime.cache.counts.copy()
    with torch.no_grad():
        for window in windows:
            past, logits = None, list[torch.Tensor]()
            for piece in [window[: profile.length // 2], *window[profile.length // 2 :].split(profile.chunk)]:
                began_s = time.perf_counter()
                output = runtime.model(piece[None].to(runtime.model.device), past_key_values=past, use_cache=True)
                past = output.past_key_values
                logits.append(output.logits[0].float().cpu())
                step_ms.append((time.perf_counter() - began_s) * 1000)
                runtime.cache.quiesce()
            lost += float(torch.nn.functional.cross_entropy(torch.cat(logits)[:-1], window[1:], reduction="sum"))
            tokens += len(window) - 1
    spent = runtime.cache.counts - before
    load_ms = 1000 * spent.transfer_s / spent.fetches if spent.fetches else 0.0
    return lost / tokens, spent.fetches / len(step_ms), load_ms, median(step_ms)
