"""SLO violations over load, on a simulated clock: eMoE's scheduler beside first come first served, SALC beside none."""

from collections.abc import Iterator
from pathlib import Path

from experts.moe.emoe.sensitivity import load_shares, weights
from experts.moe.modes.brownout import Brownout
from experts.moe.policy.expected import Frequencies
from experts.moe.policy.salc import Salc, SalcRule
from experts.moe.policy.schedule import Costs, FirstCome, Limits, Profiles, SloSlack
from experts.moe.prepared import Prepared
from experts.moe.trace import load_popularity
from tools.moe.burst import AccessTable, Controlled, Static, measure_accesses
from tools.moe.evaluate import held_out_prompts, open_runtime
from tools.moe.load import Machine, Outcome, Step, Task, Work, capacity_per_s, poisson, replay, slos, unloaded_s
from tools.moe.serving_costs import TaskLoading, measure_costs

LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 1.8)
#: Five tasks that differ in length as the fixture's domains do: long manuals, short configurations.
TASKS = (
    Task("licence", prompt_tokens=96, output_tokens=48),
    Task("python", prompt_tokens=64, output_tokens=24),
    Task("manual", prompt_tokens=128, output_tokens=64),
    Task("config", prompt_tokens=48, output_tokens=8),
    Task("docstring", prompt_tokens=64, output_tokens=32),
)
COMPUTE = Costs(prefill_token_s=2e-4, step_s=5e-3, row_s=1e-3)
LIMITS = Limits(rows=8, tokens=8 * 1024)
_REQUESTS = 600
_SEED = 3


def scheduler_points(checkpoint: Path) -> Iterator[tuple[str, float, float]]:
    """Series, load as a share of what first come, first served can do, share of requests late.

    Late is a request that takes more than three times what its task takes alone. Steps cost what they cost here, half
    of the experts are in memory, and one that is missing takes 2 ms. Raises ModelError.
    """
    prepared = Prepared(checkpoint)
    _, popular = load_popularity(prepared)
    frequencies: dict[str | None, Frequencies] = {task: shares.tolist() for task, shares in popular.items()}
    graded = weights(load_shares(prepared))
    runtime = open_runtime(checkpoint, "resident")
    try:
        machine = Machine(measure_costs(runtime), load_s=2e-3)
        slots = runtime.arch.layers * runtime.arch.experts // 2
    finally:
        runtime.close()

    def loading() -> TaskLoading:
        return TaskLoading(frequencies, graded, slots=slots, period=1)

    capacity = capacity_per_s(TASKS, FirstCome(LIMITS), machine, loading())
    slo_s = slos(TASKS, machine)
    for load in LOADS:
        trace = poisson(TASKS, load * capacity, _REQUESTS, _SEED, slo_s=slo_s)
        yield "first come, first served", load, replay(trace, FirstCome(LIMITS), machine, loading()).violations
        profiles = Profiles({task.name: task.output_tokens for task in TASKS})
        slack = SloSlack(LIMITS, machine.compute, profiles)
        yield "eMoE, by slack", load, replay(trace, slack, machine, loading(), profiles).violations


def brownout_points(checkpoint: Path) -> Iterator[tuple[str, float, float]]:
    """The same for tokens over their phase's SLO: threshold 1 always, and following latency. Raises ModelError.

    Running an expert is made to cost 1 ms: a model this small would compute all of them in less than one step's rest.
    """
    runtime = open_runtime(checkpoint, "brownout", share=1.0, options={"way": 4})
    try:
        assert isinstance(runtime.mode, Brownout)
        table = measure_accesses(runtime, runtime.mode, held_out_prompts(checkpoint, of_domain=8, length=96))
    finally:
        runtime.close()
    machine = Machine(COMPUTE, access_s=1e-3)
    capacity = capacity_per_s(TASKS, FirstCome(LIMITS), machine, Static(table))
    ttft_s, tpot_s = _unloaded(machine, table)
    for load in LOADS:
        trace = poisson(TASKS, load * capacity, _REQUESTS, _SEED)
        salc = Salc(SalcRule(slo_s=3 * ttft_s), SalcRule(slo_s=3 * tpot_s))
        sides: tuple[tuple[str, Work], ...] = (
            ("threshold 1", Static(table)),
            ("threshold by SALC", Controlled(table, salc)),
        )
        for series, work in sides:
            yield series, load, _late(replay(trace, FirstCome(LIMITS), machine, work), 3 * ttft_s, 3 * tpot_s)


def _unloaded(machine: Machine, table: AccessTable) -> tuple[float, float]:
    """Mean seconds to a first token and between tokens of requests that are alone."""

    def accesses(step: Step) -> int:
        return round(table.of(step.phase, 1.0, step.tokens))

    first: list[float] = []
    between: list[float] = []
    for task in TASKS:
        one = Task(task.name, task.prompt_tokens, 1)
        first.append(unloaded_s(one, machine, accesses))
        between.append((unloaded_s(task, machine, accesses) - first[-1]) / (task.output_tokens - 1))
    return sum(first) / len(first), sum(between) / len(between)


def _late(outcome: Outcome, ttft_s: float, tpot_s: float) -> float:
    """Share of all tokens that took longer than their phase's SLO."""
    first, between = outcome.token_latencies_s("prefill"), outcome.token_latencies_s("decode")
    late = sum(each > ttft_s for each in first) + sum(each > tpot_s for each in between)
    return late / (len(first) + len(between))
