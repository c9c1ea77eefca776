"""Generations on the simulated clock: the trace, the costs, and who misses which SLO under which scheduler."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest

pytest.importorskip("transformers", reason="language models need the extra `moe`: pip install 'coserve[moe]'")

from experts.moe.policy.schedule import FirstCome, SloSlack, StepCosts, TaskProfiles
from tests.moe.load import (
    LIMITS,
    TASKS,
    Effort,
    LoadOutcome,
    NoCosts,
    SimulatedMachine,
    SimulatedStep,
    TaskLoading,
    TextTask,
    capacity_per_s,
    poisson,
    replay,
    slos,
    unloaded_s,
)

COMPUTE = StepCosts(prefill_token_s=2e-4, step_s=8e-3, row_s=5e-4)
MACHINE = SimulatedMachine(COMPUTE)


def worst_task(outcome: LoadOutcome) -> float:
    """Return the largest share of one task's requests that were late."""
    late: dict[str | None, list[bool]] = defaultdict(list)
    for text in outcome.texts:
        late[text.generation.task].append(text.late)
    return max(sum(of_task) / len(of_task) for of_task in late.values())


def test_a_trace_has_the_rate_asked_for_which_may_change_with_time():
    trace = poisson(TASKS, 4.0, 2000, seed=1)
    assert trace == poisson(TASKS, 4.0, 2000, seed=1) != poisson(TASKS, 4.0, 2000, seed=2)
    assert 2000 / trace[-1].generation.arrived_s == pytest.approx(4.0, rel=0.1)
    manuals = [arrival.output_tokens for arrival in trace if arrival.generation.task == "manual"]
    assert sum(manuals) / len(manuals) == pytest.approx(64, rel=0.1)
    doubled = poisson(TASKS, lambda now: 2.0 if now < 100 else 8.0, 1000, seed=1)
    assert sum(arrival.generation.arrived_s < 100 for arrival in doubled) == pytest.approx(200, rel=0.2)


@pytest.mark.parametrize("scheduler", [FirstCome(LIMITS), SloSlack(LIMITS, COMPUTE, TaskProfiles())])
def test_every_request_is_served_once_and_gets_all_its_tokens(scheduler: FirstCome | SloSlack):
    trace = poisson(TASKS, 40.0, 300, seed=3, slo_s=slos(TASKS, MACHINE))
    outcome = replay(trace, scheduler, MACHINE, NoCosts())
    assert {text.generation.request for text in outcome.texts} == {f"r{number}" for number in range(300)}
    assert len(outcome.texts) == 300
    assert all(len(text.tokens_s) == text.arrival.output_tokens for text in outcome.texts)
    assert all(text.begun_s >= text.generation.arrived_s for text in outcome.texts)
    assert replay(trace, scheduler, MACHINE, NoCosts()).violations == outcome.violations


class Costly:
    """Two loads and three accesses in each step."""

    def __init__(self) -> None:
        self.latencies: list[tuple[str, float]] = []

    def begin(self, step: SimulatedStep, now: float) -> Effort:
        return Effort(loads=2, accesses=3)

    def end(self, step: SimulatedStep, latencies_s: Sequence[float], now: float) -> None:
        self.latencies += [(step.phase, latency_s) for latency_s in latencies_s]


def test_a_request_alone_takes_its_unloaded_latency_and_the_costs_of_its_mode():
    task, mode = TextTask("one", 100, 2, spread=0.0), Costly()
    trace = poisson([task], 1e-3, 1, seed=1)
    assert unloaded_s(task, MACHINE) == pytest.approx(0.008 + 100 * 2e-4 + 0.0085)
    assert replay(trace, FirstCome(LIMITS), MACHINE, NoCosts()).texts[0].latency_s == pytest.approx(0.0365)
    outcome = replay(trace, FirstCome(LIMITS), SimulatedMachine(COMPUTE, load_s=0.1, access_s=0.01), mode)
    assert mode.latencies == [("prefill", pytest.approx(0.028 + 0.23)), ("decode", pytest.approx(0.0085 + 0.23))]
    assert (outcome.loads, outcome.accesses, outcome.steps) == (4, 6, 2)
    assert (outcome.violations_of("prefill", 0.25), outcome.violations_of("decode", 0.25)) == (1.0, 0.0)


def test_only_missing_experts_of_the_tasks_at_hand_are_loaded():
    frequencies = {"a": [[0.9, 0.1, 0.0]], "b": [[0.0, 0.1, 0.9]]}
    trace = poisson([TextTask("a", 10, 1), TextTask("b", 10, 1)], 1.0, 40, seed=1)
    changes = sum(before.generation.task != after.generation.task for before, after in pairwise(trace))
    each_prompt, seldom = (TaskLoading(frequencies, {}, slots=1, floor=1, period=period) for period in (1, 10))
    assert replay(trace, FirstCome(LIMITS), SimulatedMachine(COMPUTE, load_s=1e-3), each_prompt).loads == 1 + changes
    assert replay(trace, FirstCome(LIMITS), MACHINE, seldom).loads <= 5


@pytest.mark.parametrize("seed", range(3))
def test_by_slack_fewer_requests_are_late_near_capacity(seed: int):
    capacity = capacity_per_s(TASKS, FirstCome(LIMITS), MACHINE, NoCosts())
    trace = poisson(TASKS, 0.9 * capacity, 400, seed, slo_s=slos(TASKS, MACHINE))
    profiles = TaskProfiles({task.name: task.output_tokens for task in TASKS})
    first = replay(trace, FirstCome(LIMITS), MACHINE, NoCosts())
    slack = replay(trace, SloSlack(LIMITS, COMPUTE, profiles), MACHINE, NoCosts(), profiles)
    assert slack.violations <= 0.7 * first.violations
    assert worst_task(slack) <= worst_task(first)
