"""SLO violations over load, on a simulated clock: eMoE's scheduler beside first come first served, SALC beside none."""

from collections.abc import Iterator
from pathlib import Path

from experts.moe.modes.brownout.mode import Brownout
from experts.moe.modes.emoe.sensitivity import load_shares, weights
from experts.moe.policy.expected import Frequencies
from experts.moe.policy.salc import Salc, SalcRule
from experts.moe.policy.schedule import BatchLimits, FirstCome, SloSlack, TaskProfiles
from experts.moe.trace import load_popularity
from experts.moe.weights.prepared import PreparedFiles
from tools.moe.burst import Controlled, Scene, Static, measure_accesses, scene_of
from tools.moe.evaluate import held_out_prompts, open_runtime
from tools.moe.load import Machine, Outcome, Task, Work, capacity_per_s, poisson, replay, slos
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
LIMITS = BatchLimits(rows=8, tokens=8 * 1024)
_REQUESTS = 600
_SEED = 3


def scheduler_points(checkpoint: Path) -> Iterator[tuple[str, float, float]]:
    """Series, load as a share of what first come, first served can do, share of requests late.

    Late is a request that takes more than three times what its task takes alone. Steps cost what they cost here, half
    of the experts are in memory, and one that is missing takes 2 ms. Raises ModelError.
    """
    prepared = PreparedFiles(checkpoint)
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
        profiles = TaskProfiles({task.name: task.output_tokens for task in TASKS})
        slack = SloSlack(LIMITS, machine.compute, profiles)
        yield "eMoE, by slack", load, replay(trace, slack, machine, loading(), profiles).violations


def brownout_points(checkpoint: Path) -> Iterator[tuple[str, float, float]]:
    """The same for tokens over their phase's SLO: threshold 1 always, and following latency. Raises ModelError.

    Experts run are measured; running one is made to cost 1 ms (tools/moe/burst.py says why, and what the SLOs are).
    """
    runtime = open_runtime(checkpoint, "brownout", share=1.0, options={"way": 4})
    try:
        assert isinstance(runtime.mode, Brownout)
        table = measure_accesses(runtime, runtime.mode, held_out_prompts(checkpoint, of_domain=12))
    finally:
        runtime.close()
    scene = scene_of(table)
    for load in LOADS:
        trace = poisson(scene.tasks, load * scene.capacity_per_s, _REQUESTS, _SEED)
        salc = Salc(SalcRule(slo_s=scene.slo_s["prefill"]), SalcRule(slo_s=scene.slo_s["decode"]))
        sides: tuple[tuple[str, Work], ...] = (
            ("threshold 1", Static(table)),
            ("threshold by SALC", Controlled(table, salc)),
        )
        for series, work in sides:
            yield series, load, _late(replay(trace, FirstCome(scene.limits), scene.machine, work), scene)


def _late(outcome: Outcome, scene: Scene) -> float:
    """Share of all tokens that took longer than their phase's SLO."""
    late = tokens = 0
    for phase, slo_s in scene.slo_s.items():
        found = outcome.token_latencies_s(phase)
        late += sum(each > slo_s for each in found)
        tokens += len(found)
    return late / tokens
