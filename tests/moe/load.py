"""Generations under load on the simulated clock: a seeded Poisson trace, a cost model, and SLO violations.

The scheduler is the object that the engine uses (experts/moe/policy/schedule.py). A mode takes part as `ModeCosts`:
before each step it tells how many experts the step loads and runs, after it it gets the latencies of tokens.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from daemon.dispatch.simulated import SimulatedClock
from experts.moe.model.runtime import MoeRuntime
from experts.moe.policy.expected import Frequencies, choose, expected_tokens, to_load
from experts.moe.policy.schedule import BatchLimits, Generation, GenerationScheduler, StepCosts, TaskProfiles

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class TextTask:
    """A kind of request: mean lengths in tokens. `spread`: the standard deviation of a length's logarithm."""

    name: str
    prompt_tokens: float
    output_tokens: float
    spread: float = 0.25


#: Five tasks that differ in length as the fixture's domains do: long manuals, short configurations.
TASKS = (
    TextTask("licence", prompt_tokens=96, output_tokens=48),
    TextTask("python", prompt_tokens=64, output_tokens=24),
    TextTask("manual", prompt_tokens=128, output_tokens=64),
    TextTask("config", prompt_tokens=48, output_tokens=8),
    TextTask("docstring", prompt_tokens=64, output_tokens=32),
)
LIMITS = BatchLimits(rows=8, tokens=8 * 1024)


@dataclass(frozen=True, slots=True)
class TextArrival:
    """A request and the length of its answer, which no policy knows."""

    generation: Generation
    output_tokens: int


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """`compute`: a step of the model; `load_s`: loading one expert; `access_s`: running one expert."""

    compute: StepCosts
    load_s: float = 0.0
    access_s: float = 0.0

    def step_s(self, step: "SimulatedStep", effort: "Effort") -> float:
        own = self.compute.prefill_s if step.phase == "prefill" else self.compute.decode_s
        return own(step.tokens) + effort.loads * self.load_s + effort.accesses * self.access_s


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One forward pass. `rows` run in it; `beside` wait meanwhile (a prefill holds up the decoding rows)."""

    phase: Phase
    rows: tuple[Generation, ...]
    beside: tuple[Generation, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(row.prompt_tokens for row in self.rows) if self.phase == "prefill" else len(self.rows)


@dataclass(frozen=True, slots=True)
class Effort:
    """Experts loaded before a step, which waits for them, and experts run in it over all layers."""

    loads: int = 0
    accesses: int = 0


class ModeCosts:
    """The costs of a mode: here every expert is in memory and costs nothing beside the model's own computing."""

    def begin(self, step: SimulatedStep, now: float) -> Effort:
        return Effort()

    def end(self, step: SimulatedStep, latencies_s: Sequence[float], now: float) -> None:
        """Get the latency of each row's token: in prefill since arrival, in decode since the previous token."""


class TaskLoading(ModeCosts):
    """Loads of eMoE: experts are chosen every `period` prompts, by the policies of the mode.

    `frequencies` and `weights` are by task; `slots` experts fit, `floor` of each layer.
    """

    def __init__(
        self,
        frequencies: Mapping[str | None, Frequencies],
        weights: Mapping[str | None, Sequence[float]],
        slots: int,
        *,
        floor: int = 2,
        period: int = 1,
    ) -> None:
        self._frequencies = frequencies
        self._weights = weights
        self._slots = slots
        self._floor = floor
        self._period = period
        self._profiles = TaskProfiles()
        self._chosen: tuple[tuple[int, ...], ...] = ((),) * len(next(iter(frequencies.values())))
        self._prompts = 0

    def begin(self, step: SimulatedStep, now: float) -> Effort:
        if step.phase == "decode":
            return Effort()
        self._prompts += len(step.rows)
        if self._prompts > 1 and self._prompts % self._period:
            return Effort()
        running = [(generation, 1.0) for generation in (*step.beside, *step.rows)]
        tokens = expected_tokens(running, self._frequencies, self._weights, self._profiles)
        before = self._chosen
        self._chosen = choose(tokens, self._slots, self._floor, before)
        return Effort(loads=len(to_load(self._chosen, before)))


@dataclass(slots=True)
class SimulatedText:
    """A request that was begun. `tokens_s`: the time of each of its tokens, the first from the prefill."""

    arrival: TextArrival
    generation: Generation
    tokens_s: list[float]

    @property
    def latency_s(self) -> float:
        return self.tokens_s[-1] - self.generation.arrived_s

    @property
    def late(self) -> bool:
        return self.generation.slo_s is not None and self.latency_s > self.generation.slo_s

    def token_latencies_s(self, phase: Phase) -> list[float]:
        """Return the time to the first token in prefill, the gaps between tokens in decode."""
        if phase == "prefill":
            return [self.tokens_s[0] - self.generation.arrived_s]
        return [after - before for before, after in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


@dataclass(slots=True)
class LoadOutcome:
    """The result of a replay. `texts` are in the order of completion."""

    texts: list[SimulatedText] = field(default_factory=list)
    loads: int = 0
    makespan_s: float = 0.0

    @property
    def violations(self) -> float:
        """Share of requests that took longer than their SLO, from arrival to the last token."""
        return sum(text.late for text in self.texts) / max(1, len(self.texts))

    def violations_of(self, phase: Phase, slo_s: float) -> float:
        """Return the share of one phase's tokens that took longer than `slo_s` (BrownoutServe §V.A)."""
        latencies = [latency_s for text in self.texts for latency_s in text.token_latencies_s(phase)]
        return sum(latency_s > slo_s for latency_s in latencies) / max(1, len(latencies))


def poisson(
    tasks: Sequence[TextTask],
    rate_per_s: float | Callable[[float], float],
    requests: int,
    seed: int,
    *,
    slo_s: Mapping[str, float] | None = None,
) -> tuple[TextArrival, ...]:
    """Draw a Poisson trace of tasks drawn alike (eMoE §2.1). `rate_per_s`: a number, or the rate at a time."""
    rng = random.Random(seed)
    now = 0.0
    arrivals: list[TextArrival] = []
    for number in range(requests):
        now += rng.expovariate(1.0) / (rate_per_s(now) if callable(rate_per_s) else rate_per_s)
        task = rng.choice(tasks)
        prompt, output = (_length(rng, mean, task.spread) for mean in (task.prompt_tokens, task.output_tokens))
        generation = Generation(
            request=f"r{number}",
            task=task.name,
            prompt_tokens=prompt,
            max_new_tokens=max(output, math.ceil(4 * task.output_tokens)),
            arrived_s=now,
            slo_s=None if slo_s is None else slo_s[task.name],
        )
        arrivals.append(TextArrival(generation, output))
    return tuple(arrivals)


def _length(rng: random.Random, mean: float, spread: float) -> int:
    """Draw a lognormal length around `mean`, at least one token."""
    return max(1, round(mean * rng.lognormvariate(-spread * spread / 2, spread)))


def unloaded_s(task: TextTask, machine: SimulatedMachine) -> float:
    """Return the seconds of a request of mean lengths that is alone and whose experts are loaded."""
    alone = Generation("alone", task.name, round(task.prompt_tokens), round(task.output_tokens), 0.0)
    prefill_s, decode_s = (machine.step_s(SimulatedStep(phase, (alone,)), Effort()) for phase in ("prefill", "decode"))
    return prefill_s + (alone.max_new_tokens - 1) * decode_s


def slos(tasks: Iterable[TextTask], machine: SimulatedMachine, factor: float = 3.0) -> dict[str, float]:
    """Return the SLO of each task: `factor` times its unloaded latency."""
    return {task.name: factor * unloaded_s(task, machine) for task in tasks}


def capacity_per_s(
    tasks: Sequence[TextTask],
    scheduler: GenerationScheduler,
    machine: SimulatedMachine,
    mode: ModeCosts,
    *,
    requests: int = 400,
    seed: int = 0,
) -> float:
    """Return the requests per second when another one is always waiting."""
    trace = poisson(tasks, 1.0, requests, seed)
    backlog = [replace(arrival, generation=replace(arrival.generation, arrived_s=0.0)) for arrival in trace]
    return requests / replay(backlog, scheduler, machine, mode).makespan_s


def replay(
    trace: Sequence[TextArrival],
    scheduler: GenerationScheduler,
    machine: SimulatedMachine,
    mode: ModeCosts,
    profiles: TaskProfiles | None = None,
) -> LoadOutcome:
    """Serve `trace` with the engine's batching: one prefill, then a token for all that run.

    `profiles` are the scheduler's, and learn lengths and loading as they do from the engine.
    """
    arrivals = {arrival.generation.request: arrival for arrival in trace}
    return _Replay(arrivals, scheduler, machine, mode, profiles or TaskProfiles()).run()


@dataclass
class _Replay:
    _trace: Mapping[str, TextArrival]
    _scheduler: GenerationScheduler
    _machine: SimulatedMachine
    _mode: ModeCosts
    _profiles: TaskProfiles
    _clock: SimulatedClock = field(default_factory=SimulatedClock)
    _waiting: list[Generation] = field(default_factory=list)
    _running: list[SimulatedText] = field(default_factory=list)
    _outcome: LoadOutcome = field(default_factory=LoadOutcome)

    def run(self) -> LoadOutcome:
        for arrival in self._trace.values():
            self._clock.after(arrival.generation.arrived_s, partial(self._waiting.append, arrival.generation))
        while len(self._outcome.texts) < len(self._trace):
            running = tuple(text.generation for text in self._running)
            admitted = self._scheduler.admit(self._waiting, running, self._clock.now()) if self._waiting else ()
            if admitted:
                self._prefill(admitted[0], running)
            elif not running and not self._clock.step():
                raise RuntimeError(f"{len(self._waiting)} requests wait, nothing runs, and none is admitted")
            if self._running:
                self._decode()
        self._outcome.makespan_s = self._clock.now()
        return self._outcome

    def _prefill(self, new: Generation, running: tuple[Generation, ...]) -> None:
        self._waiting.remove(new)
        begun_s = self._clock.now()
        step = SimulatedStep("prefill", (new,), running)
        effort = self._compute(step)
        if all(generation.task != new.task for generation in running):
            self._profiles.record_loading(new.task, effort.loads * self._machine.load_s)
        begun = replace(new, generated=1, began_s=begun_s)
        self._running.append(SimulatedText(self._trace[new.request], begun, [self._clock.now()]))
        self._end(step, [self._clock.now() - new.arrived_s])

    def _decode(self) -> None:
        step = SimulatedStep("decode", tuple(text.generation for text in self._running))
        self._compute(step)
        now = self._clock.now()
        latencies_s = [now - text.tokens_s[-1] for text in self._running]
        for text in self._running:
            text.tokens_s.append(now)
            text.generation = replace(text.generation, generated=text.generation.generated + 1)
        self._end(step, latencies_s)

    def _compute(self, step: SimulatedStep) -> Effort:
        """Let the step's time pass, with the arrivals meanwhile."""
        effort = self._mode.begin(step, self._clock.now())
        until_s = self._clock.now() + self._machine.step_s(step, effort)
        while self._clock.now() < until_s:
            self._clock.step(until_s)
        self._outcome.loads += effort.loads
        return effort

    def _end(self, step: SimulatedStep, latencies_s: Sequence[float]) -> None:
        self._mode.end(step, latencies_s, self._clock.now())
        ended = [text for text in self._running if text.generation.generated >= text.arrival.output_tokens]
        for text in ended:
            self._profiles.record_length(text.generation)
            self._outcome.texts.append(text)
            self._running.remove(text)


def measure_costs(runtime: MoeRuntime, *, repeats: int = 5) -> StepCosts:
    """Measure prefills by length and decode steps by rows, and fit costs without negative ones by least squares."""
    from scipy.optimize import nnls

    model, vocabulary = runtime.model, runtime.model.config.vocab_size
    rows: list[list[int]] = []
    seconds: list[float] = []
    for tokens in (32, 64, 128, 256):
        ids = torch.randint(3, vocabulary, (1, tokens))
        rows.append([tokens, 1, 0])
        seconds.append(_median_s(partial(model, ids, logits_to_keep=1), repeats))
    for batch in (1, 2, 4, 8):
        ids = torch.randint(3, vocabulary, (batch, 32))
        with torch.inference_mode():
            past = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        rows.append([0, 1, batch])
        seconds.append(_median_s(partial(model, ids[:, :1], past_key_values=past, use_cache=True), repeats))
    costs, _ = nnls(np.array(rows, dtype=float), np.array(seconds))
    return StepCosts(*(float(cost) for cost in costs))


@torch.inference_mode()
def _median_s(run: Callable[[], Any], repeats: int) -> float:
    run()
    times: list[float] = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)
