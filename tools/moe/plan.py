"""`coserve moe plan`: SwapMoE's planner for a memory budget."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from tools.cli.console import console, print_table
from tools.moe.fixture import DEFAULT_FIXTURE

if TYPE_CHECKING:
    import torch

    from experts.moe.arch import MoeArch
    from experts.moe.gating import ForwardStep, Routing
    from experts.moe.model.runtime import MoeRuntime
    from experts.moe.modes.swapmoe.plan import MemoryPlan, Preparation
    from experts.moe.modes.swapmoe.planner import MeasuredPlan, PlanLimits
    from experts.moe.policy.genetic import Configuration, SearchSettings
    from experts.moe.weights.prepared import PreparedFiles

#: Update cycles that are tried, from the highest frequency to the lowest (§3.5.1).
_PERIODS = (1, 2, 4, 8, 16, 32)
#: Searches, each with what the one before has found measured and learned from.
_ROUNDS = 8
_MEASURED = "plan-measured"


@dataclass(frozen=True, slots=True)
class PlanProfile:
    """The text that configurations are measured on: windows of the training files, domain after domain.

    Of `length` tokens the first half is a prompt, the others come `chunk` at a time: a step each, as decoding would
    take them one by one, and as quick as prefill.
    """

    of_domain: int = 6
    length: int = 192
    chunk: int = 8


@dataclass(frozen=True, slots=True)
class PassResult:
    """What one pass over the profile gave."""

    loss: float
    loads: float
    load_ms: float
    step_ms: float


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command()(plan)


def plan(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder in Hugging Face format.")] = (
        DEFAULT_FIXTURE
    ),
    budget: Annotated[str, typer.Option(help="Memory for experts: `600MiB`, or a part of all of them: `50%`.")] = "50%",
    configurations: Annotated[int, typer.Option(min=8, help="Random ones to measure.")] = 40,
    link_ms: Annotated[float | None, typer.Option(help="Plan for a link of so many ms per expert.")] = None,
) -> None:
    """Divide a memory budget among a model's layers, and say how often experts are swapped (mode swapmoe).

    Stopped, it goes on with the configuration it was at. What is planned already for this budget is planned anew, from
    the measurements that are there.
    """
    planner = Planner(checkpoint, budget, PlanProfile(), link_ms)
    made = planner.run(configurations)
    even = planner.measured(planner.even, made.period)
    rows = [
        ("even split", _spelled(planner.even), f"{even.loss:.4f}", f"{even.loads:.2f}"),
        ("planned", _spelled(made.counts), *_figures(planner.measured(made.counts, made.period))),
    ]
    print_table(f"{checkpoint}, {made.budget_bytes} bytes, an update cycle of {made.period} steps", _COLUMNS, rows)


_COLUMNS = ("plan", "virtual experts of each layer", "nats per token", "loads per step")


def _spelled(counts: "Configuration") -> str:
    return " ".join(str(count) for count in counts)


def _figures(one: "MeasuredPlan") -> tuple[str, str]:
    return f"{one.loss:.4f}", f"{one.loads:.2f}"


class Planner:
    """One budget of one checkpoint; measurements are kept beside it and not taken twice. Raises ModelError."""

    def __init__(self, checkpoint: Path, budget: str, profile: PlanProfile, link_ms: float | None) -> None:
        from experts.moe.modes.swapmoe.plan import load_preparation
        from experts.moe.modes.swapmoe.planner import even_counts
        from experts.moe.weights.prepared import PreparedFiles
        from tools.moe.evaluate import arch_of

        self._prepared = PreparedFiles(checkpoint)
        self._profile = profile
        self._link_ms = link_ms
        self._arch = arch_of(checkpoint)
        self._slots = _slots(self._arch, budget, checkpoint)
        self.budget_bytes = self._slots * self._arch.expert_bytes
        self._windows = _windows(self._prepared, profile)
        self._preparation = load_preparation(checkpoint) or self._prepare()
        self._kept = self._load_measured()
        self.even = even_counts(self._arch.layers, self._arch.experts, self._slots)

    def run(self, configurations: int, settings: "SearchSettings | None" = None) -> "MemoryPlan":
        """Measure, search, and write the plan; the paper's `settings` of the search by default."""
        from experts.moe.modes.swapmoe.plan import MemoryPlan, save_preparation, with_plan
        from experts.moe.modes.swapmoe.planner import random_counts
        from experts.moe.policy.genetic import SearchSettings

        limits, period = self._frequency()
        drawn = random_counts(self._arch.layers, self._arch.experts, self._arch.top_k, self._slots, configurations)
        with _progress("configurations", len(drawn)) as advance:
            for counts in drawn:
                self.measured(counts, period)
                advance()
        for _ in range(_ROUNDS):
            try:
                found = self._search(limits, period, drawn, settings or SearchSettings())
            except ValueError:
                break  # what the budget allows is all measured
            drawn = (*drawn, found)
            self.measured(found, period)
        fits = [self.measured(counts, period) for counts in drawn if sum(counts) <= self._slots]
        made = MemoryPlan(self.budget_bytes, min(fits, key=lambda one: one.loss).counts, period)
        ready = self._preparation
        plans = with_plan(ready.plans, made)
        save_preparation(self._prepared, type(ready)(ready.norms, ready.importance, plans))
        return made

    def measured(self, counts: "Configuration", period: int) -> "MeasuredPlan":
        """What a configuration loses on the profile; measured now, unless it was before."""
        from experts.moe.modes.swapmoe.planner import MeasuredPlan

        key = f"{'-'.join(map(str, counts))}@{period}"
        if key not in self._kept:
            served = self._serve(counts, period, self._windows, None)
            self._kept[key] = MeasuredPlan(counts, period, served.loss, served.loads)
            self._save_measured()
        return self._kept[key]

    def _frequency(self) -> "tuple[PlanLimits, int]":
        """How many loads a step has time for, and the highest frequency that keeps to it (§3.5.1)."""
        from experts.moe.modes.swapmoe.planner import PlanLimits, fastest_period

        served = self._serve(self.even, self._arch.layers, self._windows[:4], self._link_ms)
        limits = PlanLimits(self._slots, served.load_ms, served.step_ms)
        with _progress("update frequencies", len(_PERIODS)) as advance:
            tried: list[MeasuredPlan] = []
            for period in _PERIODS:
                tried.append(self.measured(self.even, period))
                advance()
        return limits, fastest_period(tried, limits)

    def _search(
        self, limits: "PlanLimits", period: int, drawn: "Sequence[Configuration]", settings: "SearchSettings"
    ) -> "Configuration":
        from experts.moe.modes.swapmoe.planner import LossModel, plan_counts

        measured = [self.measured(counts, period) for counts in drawn]
        model = LossModel(measured, self._arch.experts)
        with _progress("generations", settings.generations) as advance:
            return plan_counts(
                model,
                measured,
                limits,
                experts=self._arch.experts,
                floor=self._arch.top_k,
                settings=settings,
                progress=lambda _: advance(),
            )

    def _prepare(self) -> "Preparation":
        """Norms of all experts, and what Eq. 2 says of them on the profile when every expert takes part."""
        import torch

        from experts.moe.model.runtime import MoeRuntime
        from experts.moe.modes.ondemand import OnDemand
        from experts.moe.modes.swapmoe.mode import expert_norms, importance
        from experts.moe.modes.swapmoe.plan import Preparation, save_preparation

        runtime = MoeRuntime.open(self._prepared.checkpoint, OnDemand(), self.budget_bytes)
        try:
            with console.status("norms of all experts"):
                norms = expert_norms(runtime.store)
            sums = torch.zeros_like(norms)

            def watch(_step: "ForwardStep", gate: "Routing", _carried_out: "Routing") -> None:
                sums[gate.layer] += importance(gate, norms[gate.layer])

            runtime.observers.append(watch)
            with _progress("importance", len(self._windows)) as advance, torch.no_grad():
                for window in self._windows:
                    runtime.model(window[None], use_cache=False, logits_to_keep=1)
                    advance()
        finally:
            runtime.close()
        ready = Preparation(norms, sums)
        save_preparation(self._prepared, ready)
        return ready

    def _serve(
        self, counts: "Configuration", period: int, windows: "Sequence[torch.Tensor]", link_ms: float | None
    ) -> PassResult:
        """One pass over the windows in a configuration, which the model is opened for."""
        from experts.moe.cache.link import SlowLink
        from experts.moe.model.runtime import MoeRuntime
        from experts.moe.modes.swapmoe.mode import SwapMoe

        mode = SwapMoe(self._preparation, counts=counts, period=period)
        size_bytes = sum(counts) * self._arch.expert_bytes
        link = SlowLink(link_ms) if link_ms else None
        runtime = MoeRuntime.open(self._prepared.checkpoint, mode, size_bytes, link=link)
        try:
            return _pass(runtime, windows, self._profile)
        finally:
            runtime.close()

    def _load_measured(self) -> "dict[str, MeasuredPlan]":
        """What was measured on this profile before, by configuration."""
        from experts.moe.errors import ModelError
        from experts.moe.modes.swapmoe.planner import MeasuredPlan

        try:
            kept = self._prepared.load_json(_MEASURED)
        except ModelError:
            return {}
        if kept["profile"] != asdict(self._profile):
            return {}
        return {
            key: MeasuredPlan(tuple(one["counts"]), one["period"], one["loss"], one["loads"])
            for key, one in kept["measured"].items()
        }

    def _save_measured(self) -> None:
        measured = {key: asdict(one) for key, one in self._kept.items()}
        self._prepared.save_json(_MEASURED, {"profile": asdict(self._profile), "measured": measured})


def _slots(arch: "MoeArch", budget: str, checkpoint: Path) -> int:
    """Experts that a budget holds. Raises ModelError where it is no size, or too small for the mode."""
    from daemon.units import parse_bytes
    from experts.moe.errors import ModelError

    everybody = arch.layers * arch.experts
    try:
        part = float(budget.removesuffix("%")) / 100 if budget.endswith("%") else None
        slots = int(part * everybody + 1e-9) if part is not None else parse_bytes(budget) // arch.expert_bytes
    except ValueError as error:
        raise ModelError(checkpoint, f"{budget!r} is no budget: give a size, 600MiB, or a part, 50%") from error
    least = arch.layers * arch.top_k
    if slots < least:
        message = f"a budget of {budget} holds {slots} experts of {arch.expert_bytes} bytes"
        raise ModelError(
            checkpoint, f"{message}; mode swapmoe needs {least}, {arch.top_k} for each layer: give it more"
        )
    return min(slots, everybody)


def _windows(prepared: "PreparedFiles", profile: PlanProfile) -> "list[torch.Tensor]":
    """(length,) int64 each, domain after domain: text has a subject and keeps to it (§2.4). Raises ModelError."""
    from tools.moe.text import TRAIN, load_text

    text = load_text(prepared, TRAIN)
    return [row for domain in text.ids for row in text.windows(domain, profile.length, profile.of_domain)]


def _pass(runtime: "MoeRuntime", windows: "Sequence[torch.Tensor]", profile: PlanProfile) -> PassResult:
    """The windows one after the other; swaps end before the next step, so that a measurement can be repeated."""
    import torch

    lost, tokens, step_ms = 0.0, 0, list[float]()
    before = runtime.cache.metrics.counts.copy()
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
            said = torch.cat(logits)[:-1]
            lost += float(torch.nn.functional.cross_entropy(said, window[1:], reduction="sum"))
            tokens += len(window) - 1
    spent = runtime.cache.metrics.counts - before
    load_ms = 1000 * spent.transfer_s / spent.fetches if spent.fetches else 0.0
    return PassResult(lost / tokens, spent.fetches / len(step_ms), load_ms, median(step_ms))


@contextmanager
def _progress(what: str, total: int) -> "Iterator[Callable[[], None]]":
    """A bar, and what moves it on by one."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from tools.cli.progress import Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda: progress.advance(bar)
