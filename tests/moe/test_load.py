"""Generations on the simulated clock: each is served once, and by slack fewer are late."""

from collections import defaultdict
from itertools import pairwise

import pytest

pytest.importorskip("transformers", reason="language models need the extra `moe`: pip install 'coserve[moe]'")

from experts.moe.policy.schedule import FirstCome, SloSlack, StepCosts, TaskProfiles
from tests.moe.load import (
    LIMITS,
    TASKS,
    LoadOutcome,
    ModeCosts,
    SimulatedMachine,
    TaskLoading,
    TextTask,
    capacity_per_s,
    poisson,
    replay,
    slos,
)

COMPUTE = StepCosts(prefill_token_s=2e-4, step_s=8e-3, row_s=5e-4)
MACHINE = SimulatedMachine(COMPUTE)


def worst_task(outcome: LoadOutcome) -> float:
    """Return the largest share of one task's requests that were late."""
    late: dict[str | None, list[bool]] = defaultdict(list)
    for text in outcome.texts:
        late[text.generation.task].append(text.late)
    return max(sum(of_task) / len(of_task) for of_task in late.values())


@pytest.mark.parametrize("scheduler", [FirstCome(LIMITS), SloSlack(LIMITS, COMPUTE, TaskProfiles())])
def test_every_request_is_served_once_and_gets_all_its_tokens(scheduler: FirstCome | SloSlack):
    trace = poisson(TASKS, 40.0, 300, seed=3, slo_s=slos(TASKS, MACHINE))
    outcome = replay(trace, scheduler, MACHINE, ModeCosts())
    assert {text.generation.request for text in outcome.texts} == {f"r{number}" for number in range(300)}
    assert len(outcome.texts) == 300
    assert all(len(text.tokens_s) == text.arrival.output_tokens for text in outcome.texts)
    assert replay(trace, scheduler, MACHINE, ModeCosts()).violations == outcome.violations


def test_only_missing_experts_of_the_tasks_at_hand_are_loaded():
    frequencies = {"a": [[0.9, 0.1, 0.0]], "b": [[0.0, 0.1, 0.9]]}
    trace = poisson([TextTask("a", 10, 1), TextTask("b", 10, 1)], 1.0, 40, seed=1)
    changes = sum(before.generation.task != after.generation.task for before, after in pairwise(trace))
    each_prompt, seldom = (TaskLoading(frequencies, {}, slots=1, floor=1, period=period) for period in (1, 10))
    assert replay(trace, FirstCome(LIMITS), SimulatedMachine(COMPUTE, load_s=1e-3), each_prompt).loads == 1 + changes
    assert replay(trace, FirstCome(LIMITS), MACHINE, seldom).loads <= 5


@pytest.mark.parametrize("seed", range(3))
def test_by_slack_fewer_requests_are_late_near_capacity(seed: int):
    capacity = capacity_per_s(TASKS, FirstCome(LIMITS), MACHINE, ModeCosts())
    trace = poisson(TASKS, 0.9 * capacity, 400, seed, slo_s=slos(TASKS, MACHINE))
    profiles = TaskProfiles({task.name: task.output_tokens for task in TASKS})
    first = replay(trace, FirstCome(LIMITS), MACHINE, ModeCosts())
    slack = replay(trace, SloSlack(LIMITS, COMPUTE, profiles), MACHINE, ModeCosts(), profiles)
    assert slack.violations <= 0.7 * first.violations
    assert worst_task(slack) <= worst_task(first)
