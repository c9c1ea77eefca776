"""Generations under load, on a simulated clock: a seeded Poisson trace, a cost model, and who missed which SLO.

The scheduler is the object that the daemon's engine asks (experts/moe/policy/schedule.py). A mode comes in as `Work`:
before each step it says how many experts it must load and how many it runs, after it it hears how long tokens took.

    tasks = [Task("json", prompt_tokens=64, output_tokens=16), …]
    costs = Machine(Costs(prefill_token_s=2e-4, step_s=5e-3, row_s=1e-3), load_s=2e-3, access_s=0.0)
    work = TaskLoading(frequencies, {}, slots=64, least=2)  # of serving_costs.py
    rate = 0.9 * capacity_per_s(tasks, FirstCome(limits), costs, work)
    trace = poisson(tasks, rate, requests=1000, seed=1, slo_s=slos(tasks, costs))
    outcome = replay(trace, SloSlack(limits, costs.compute, profiles), costs, work, profiles)
    outcome.violations, outcome.violations_of("prefill", 0.25)
"""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from experts.moe.policy.schedule import Generation, GenerationScheduler, StepCosts, TaskProfiles

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of request: mean lengths in tokens. `spread`: the standard deviation of a length's logarithm."""

    name: str
    prompt_tokens: float
    output_tokens: float
    spread: float = 0.25


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the length that its answer will have, which no policy knows."""

    generation: Generation
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Machine:
    """`compute`: a step of the model; `load_s`: an expert's way to its slot; `access_s`: a run of one expert."""

    compute: StepCosts
    load_s: float = 0.0
    access_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. `rows` run in it; `beside` wait meanwhile (a prefill holds up the decoding rows)."""

    phase: Phase
    rows: tuple[Generation, ...]
    beside: tuple[Generation, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(row.prompt_tokens for row in self.rows) if self.phase == "prefill" else len(self.rows)


@dataclass(frozen=True, slots=True)
class Effort:
    """What a step asks of the experts: so many loaded before it (the step waits), so many run in it over all layers."""

    loads: int = 0
    accesses: int = 0


class Work(Protocol):
    """A mode, as far as it costs time."""

    def begin(self, step: Step, now: float) -> Effort: ...

    def end(self, step: Step, latencies_s: Sequence[float], now: float) -> None:
        """The step is over. Latency of each row's token: in prefill since arrival, in decode since the one before."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """A completed request; times in seconds. `tokens_s`: when each of its tokens came, the first of the prefill."""

    arrival: Arrival
    begun_s: float
    tokens_s: tuple[float, ...]

    @property
    def latency_s(self) -> float:
        return self.tokens_s[-1] - self.arrival.generation.arrived_s

    @property
    def late(self) -> bool:
        slo_s = self.arrival.generation.slo_s
        return slo_s is not None and self.latency_s > slo_s

    def token_latencies_s(self, phase: Phase) -> tuple[float, ...]:
        """Prefill: the time to the first token. Decode: the gaps between tokens."""
        if phase == "prefill":
            return (self.tokens_s[0] - self.arrival.generation.arrived_s,)
        return tuple(after - before for before, after in zip(self.tokens_s, self.tokens_s[1:], strict=False))


@dataclass(slots=True)
class Outcome:
    """What became of a trace. `done` is in the order of completion."""

    done: list[Done] = field(default_factory=list)
    loads: int = 0
    accesses: int = 0
    steps: int = 0
    makespan_s: float = 0.0

    @property
    def violations(self) -> float:
        """Share of requests that took longer than their SLO, from arrival to the last token."""
        return sum(one.late for one in self.done) / max(1, len(self.done))

    def violations_of(self, phase: Phase, slo_s: float) -> float:
        """Share of the tokens of one phase that took longer than `slo_s` (BrownoutServe §V.A)."""
        latencies = self.token_latencies_s(phase)
        return sum(latency_s > slo_s for latency_s in latencies) / max(1, len(latencies))

    def token_latencies_s(self, phase: Phase) -> list[float]:
        return [latency_s for one in self.done for latency_s in one.token_latencies_s(phase)]


def poisson(
    tasks: Sequence[Task],
    rate_per_s: float | Callable[[float], float],
    requests: int,
    seed: int,
    *,
    slo_s: Mapping[str, float] | None = None,
) -> tuple[Arrival, ...]:
    """A Poisson trace, its tasks drawn alike (eMoE §2.1). `rate_per_s`: a number, or the rate at a time (a burst)."""
    rng = random.Random(seed)
    now = 0.0
    arrivals: list[Arrival] = []
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
        arrivals.append(Arrival(generation, output))
    return tuple(arrivals)


def unloaded_s(task: Task, machine: Machine, accesses: Callable[[Step], int] | None = None) -> float:
    """Seconds that a request of mean lengths takes when it is alone and its experts are there."""
    one = Generation("alone", task.name, round(task.prompt_tokens), round(task.output_tokens), 0.0)
    prefill, decode = Step("prefill", (one,)), Step("decode", (one,))
    steps = [(prefill, 1), (decode, one.max_new_tokens - 1)]
    return sum(count * _step_s(step, machine, Effort(0, accesses(step) if accesses else 0)) for step, count in steps)


def slos(tasks: Iterable[Task], machine: Machine, factor: float = 3.0) -> dict[str, float]:
    """The SLO of each task: `factor` times its unloaded latency."""
    return {task.name: factor * unloaded_s(task, machine) for task in tasks}


def capacity_per_s(
    tasks: Sequence[Task],
    scheduler: GenerationScheduler,
    machine: Machine,
    work: Work,
    *,
    requests: int = 400,
    seed: int = 0,
) -> float:
    """Requests per second when there is always one more waiting."""
    backlog = [
        replace(one, generation=replace(one.generation, arrived_s=0.0)) for one in poisson(tasks, 1.0, requests, seed)
    ]
    return requests / replay(backlog, scheduler, machine, work).makespan_s


def replay(
    trace: Sequence[Arrival],
    scheduler: GenerationScheduler,
    machine: Machine,
    work: Work,
    profiles: TaskProfiles | None = None,
) -> Outcome:
    """Serve `trace`, in order of arrival, with the engine's batching: one prefill, then a token for all that run.

    `profiles` are the scheduler's, told of lengths and loading as the engine tells them.
    """
    return _Replay(trace, scheduler, machine, work, profiles or TaskProfiles()).run()


@dataclass(slots=True)
class _Active:
    arrival: Arrival
    generation: Generation
    begun_s: float
    tokens_s: list[float]


class _Replay:
    def __init__(
        self,
        trace: Sequence[Arrival],
        scheduler: GenerationScheduler,
        machine: Machine,
        work: Work,
        profiles: TaskProfiles,
    ) -> None:
        self._profiles = profiles
        self._trace = trace
        self._arrived_s = [one.generation.arrived_s for one in trace]
        self._by_name = {one.generation.request: one for one in trace}
        self._scheduler = scheduler
        self._machine = machine
        self._work = work
        self._waiting: list[Generation] = []
        self._active: list[_Active] = []
        self._seen = 0
        self._now = 0.0
        self._outcome = Outcome()

    def run(self) -> Outcome:
        while len(self._outcome.done) < len(self._trace):
            self._take_arrivals()
            running = tuple(one.generation for one in self._active)
            new = self._scheduler.admit(self._waiting, running, self._now)[:1] if self._waiting else ()
            if new:
                self._prefill(new, running)
            elif not running:
                self._skip()
            if self._active:
                self._decode()
        self._outcome.makespan_s = self._now
        return self._outcome

    def _take_arrivals(self) -> None:
        upto = bisect_right(self._arrived_s, self._now)
        self._waiting += [one.generation for one in self._trace[self._seen : upto]]
        self._seen = upto

    def _skip(self) -> None:
        """Nothing runs: on to the next arrival. Raises RuntimeError where none is left, a defect of the policy."""
        if self._seen == len(self._trace):
            raise RuntimeError(f"{len(self._waiting)} requests wait, nothing runs, and none is admitted")
        self._now = self._arrived_s[self._seen]

    def _prefill(self, new: tuple[Generation, ...], running: tuple[Generation, ...]) -> None:
        names = {one.request for one in new}
        self._waiting = [one for one in self._waiting if one.request not in names]
        begun_s = self._now
        step = Step("prefill", new, running)
        effort = self._pass(step)
        self._tell_loading(step, effort)
        for one in new:
            active = _Active(
                self._by_name[one.request], replace(one, generated=1, began_s=begun_s), begun_s, [self._now]
            )
            self._active.append(active)
        self._work.end(step, [self._now - one.arrived_s for one in new], self._now)
        self._collect()

    def _decode(self) -> None:
        step = Step("decode", tuple(one.generation for one in self._active))
        self._pass(step)
        latencies_s = [self._now - one.tokens_s[-1] for one in self._active]
        for one in self._active:
            one.tokens_s.append(self._now)
            one.generation = replace(one.generation, generated=one.generation.generated + 1)
        self._work.end(step, latencies_s, self._now)
        self._collect()

    def _pass(self, step: Step) -> Effort:
        effort = self._work.begin(step, self._now)
        self._now += _step_s(step, self._machine, effort)
        self._outcome.steps += 1
        self._outcome.loads += effort.loads
        self._outcome.accesses += effort.accesses
        return effort

    def _tell_loading(self, step: Step, effort: Effort) -> None:
        there = {one.task for one in step.beside}
        entering = [task for task in dict.fromkeys(one.task for one in step.rows) if task not in there]
        for task in entering:
            self._profiles.loaded(task, effort.loads * self._machine.load_s / len(entering))

    def _collect(self) -> None:
        left: list[_Active] = []
        for one in self._active:
            if one.generation.generated < one.arrival.output_tokens:
                left.append(one)
                continue
            self._profiles.ended(one.generation)
            self._outcome.done.append(Done(one.arrival, one.begun_s, tuple(one.tokens_s)))
        self._active = left


def _step_s(step: Step, machine: Machine, effort: Effort) -> float:
    own_s = machine.compute.prefill_s(step.tokens) if step.phase == "prefill" else machine.compute.decode_s(step.tokens)
    return own_s + effort.loads * machine.load_s + effort.accesses * machine.access_s


def _length(rng: random.Random, mean: float, spread: float) -> int:
    """At least one token; lognormal around `mean`."""
    return max(1, round(mean * rng.lognormvariate(-spread * spread / 2, spread)))
