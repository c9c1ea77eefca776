"""Load on a simulated clock: the same trace each time, every request served once, and who is late under which order."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest

from experts.moe.policy.schedule import BatchLimits, FirstCome, SloSlack, StepCosts, TaskProfiles
from tools.moe.load import Effort, Machine, Outcome, Step, Task, capacity_per_s, poisson, replay, slos, unloaded_s
from tools.moe.serving_costs import TaskLoading

TASKS = (
    Task("licence", prompt_tokens=96, output_tokens=48),
    Task("python", prompt_tokens=64, output_tokens=24),
    Task("manual", prompt_tokens=128, output_tokens=64),
    Task("config", prompt_tokens=48, output_tokens=8),
    Task("docstring", prompt_tokens=64, output_tokens=32),
)
COMPUTE = StepCosts(prefill_token_s=2e-4, step_s=8e-3, row_s=5e-4)
LIMITS = BatchLimits(rows=8, tokens=8192)


class Free:
    """Every expert is in memory and costs nothing beside the model's own computing."""

    def begin(self, step: Step, now: float) -> Effort:
        return Effort()

    def end(self, step: Step, latencies_s: Sequence[float], now: float) -> None:
        pass


def worst_task(outcome: Outcome) -> float:
    """The largest share of one task's requests that were late."""
    late: dict[str | None, list[bool]] = defaultdict(list)
    for one in outcome.done:
        late[one.arrival.generation.task].append(one.late)
    return max(sum(those) / len(those) for those in late.values())


def test_a_trace_is_the_same_for_the_same_seed_and_has_the_rate_asked_for():
    trace = poisson(TASKS, 4.0, 2000, seed=1)
    assert trace == poisson(TASKS, 4.0, 2000, seed=1)
    assert trace != poisson(TASKS, 4.0, 2000, seed=2)
    assert 2000 / trace[-1].generation.arrived_s == pytest.approx(4.0, rel=0.1)
    mean = {task.name: [one.output_tokens for one in trace if one.generation.task == task.name] for task in TASKS}
    assert sum(mean["manual"]) / len(mean["manual"]) == pytest.approx(64, rel=0.1)


def test_the_rate_of_a_trace_may_change_with_time():
    trace = poisson(TASKS, lambda now: 2.0 if now < 100 else 8.0, 1000, seed=1)
    early = sum(one.generation.arrived_s < 100 for one in trace)
    assert early == pytest.approx(200, rel=0.2)
    assert trace[-1].generation.arrived_s == pytest.approx(200, rel=0.1)


def test_a_request_alone_takes_its_unloaded_latency():
    task = Task("one", 100, 11, spread=0.0)
    machine = Machine(COMPUTE)
    outcome = replay(poisson([task], 1e-3, 3, seed=1), FirstCome(LIMITS), machine, Free())
    assert unloaded_s(task, machine) == pytest.approx(0.008 + 100 * 2e-4 + 10 * 0.0085)
    assert [one.latency_s for one in outcome.done] == pytest.approx([unloaded_s(task, machine)] * 3)


@pytest.mark.parametrize("kind", ["first", "slack"])
def test_every_request_is_served_once_and_gets_all_its_tokens(kind):
    trace = poisson(TASKS, 40.0, 300, seed=3, slo_s=slos(TASKS, Machine(COMPUTE)))
    scheduler = FirstCome(LIMITS) if kind == "first" else SloSlack(LIMITS, COMPUTE, TaskProfiles())
    outcome = replay(trace, scheduler, Machine(COMPUTE), Free())
    assert sorted(one.arrival.generation.request for one in outcome.done) == sorted(
        f"r{number}" for number in range(300)
    )
    assert all(len(one.tokens_s) == one.arrival.output_tokens for one in outcome.done)
    assert all(one.begun_s >= one.arrival.generation.arrived_s for one in outcome.done)
    again = replay(trace, scheduler, Machine(COMPUTE), Free())
    assert again.violations == outcome.violations


def test_a_mode_costs_its_loads_and_accesses_and_hears_of_latencies():
    heard = []

    class Costly:
        def begin(self, step, now):
            return Effort(loads=2, accesses=3)

        def end(self, step, latencies_s, now):
            heard.append((step.phase, *latencies_s))

    task = Task("one", 100, 2, spread=0.0)
    machine = Machine(COMPUTE, load_s=0.1, access_s=0.01)
    outcome = replay(poisson([task], 1.0, 1, seed=1), FirstCome(LIMITS), machine, Costly())
    assert heard == [("prefill", pytest.approx(0.028 + 0.23)), ("decode", pytest.approx(0.0085 + 0.23))]
    assert (outcome.loads, outcome.accesses, outcome.steps) == (4, 6, 2)
    assert outcome.violations_of("prefill", 0.25) == 1.0
    assert outcome.violations_of("decode", 0.25) == 0.0


def test_loading_costs_only_what_the_tasks_at_hand_want_and_is_not_there():
    frequencies = {"a": [[0.9, 0.1, 0.0]], "b": [[0.0, 0.1, 0.9]]}
    work = TaskLoading(frequencies, {}, slots=1, least=1)
    trace = poisson([Task("a", 10, 1), Task("b", 10, 1)], 1.0, 40, seed=1)
    changes = sum(before.generation.task != after.generation.task for before, after in pairwise(trace))
    outcome = replay(trace, FirstCome(LIMITS), Machine(COMPUTE, load_s=1e-3), work)
    assert outcome.loads == 1 + changes
    seldom = TaskLoading(frequencies, {}, slots=1, least=1, period=10)
    assert replay(trace, FirstCome(LIMITS), Machine(COMPUTE), seldom).loads <= 5


@pytest.mark.parametrize("seed", range(3))
def test_by_slack_fewer_are_late_near_capacity(seed):
    machine = Machine(COMPUTE)
    capacity = capacity_per_s(TASKS, FirstCome(LIMITS), machine, Free())
    trace = poisson(TASKS, 0.9 * capacity, 400, seed, slo_s=slos(TASKS, machine))
    profiles = TaskProfiles({task.name: task.output_tokens for task in TASKS})
    first = replay(trace, FirstCome(LIMITS), machine, Free())
    slack = replay(trace, SloSlack(LIMITS, COMPUTE, profiles), machine, Free(), profiles)
    assert slack.violations <= 0.7 * first.violations
    assert worst_task(slack) <= worst_task(first)
