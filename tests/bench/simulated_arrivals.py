"""Simulated arrivals at rates below and above the line's: latency, misses and unknowns of each policy."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.bench.live.image_trace import Arrivals, arrival_times_s
from tools.simulate.engine import TaskOutcome, simulate
from tools.simulate.report import quantile
from tools.simulate.world import SimulatedMachine, Task, with_deadlines


@dataclass(frozen=True, slots=True)
class OnlineRow:
    """One policy at one load. Latencies in seconds, without deadlines; with them, as shares: images that were not
    answered in time, those of them that were computed to the end, and the requests that were computed in vain.
    """

    policy: str
    arrivals: Arrivals
    load: float
    images_per_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    longest_wait_s: float
    unknown_share: float
    late_share: float
    good_per_s: float
    wasted_share: float


def arriving(task: Task, rate_per_s: float, arrivals: Arrivals) -> Task:
    """Return the task whose images arrive at `rate_per_s`: one by one, or a board's worth at once."""
    times_s = arrival_times_s(rate_per_s, arrivals, seed=1)
    return replace(task, images=tuple(replace(image, arrived_s=next(times_s)) for image in task.images))


def at_once(task: Task) -> Task:
    """Return the task with all images waiting from the start."""
    return replace(task, images=tuple(replace(image, arrived_s=0.0) for image in task.images))


def online_rows(
    machines: dict[str, SimulatedMachine],
    task: Task,
    saturated_per_s: float,
    loads: Sequence[float],
    kinds: Iterable[Arrivals],
    deadline_s: float,
) -> Iterator[OnlineRow]:
    """Yield a row for each policy of `machines`, load (a share of `saturated_per_s`) and kind of arrivals."""
    for kind in kinds:
        for load in loads:
            paced = arriving(task, load * saturated_per_s, kind)
            limited = with_deadlines(paced, deadline_s)
            for policy, machine in machines.items():
                free = simulate(machine, paced, policy)
                yield _row(policy, kind, load, free, simulate(machine, limited, policy))


def _row(policy: str, kind: Arrivals, load: float, free: TaskOutcome, limited: TaskOutcome) -> OnlineRow:
    latencies = free.latencies_s
    in_time = limited.answered - limited.late
    return OnlineRow(
        policy=policy,
        arrivals=kind,
        load=load,
        images_per_s=round(free.images / free.makespan_s, 2),
        p50_s=round(quantile(latencies, 0.5), 3),
        p95_s=round(quantile(latencies, 0.95), 3),
        p99_s=round(quantile(latencies, 0.99), 3),
        longest_wait_s=round(max(free.waits_s), 3),
        unknown_share=round((limited.expired + limited.late) / limited.images, 4),
        late_share=round(limited.late / limited.images, 4),
        good_per_s=round(in_time / limited.makespan_s, 2),
        wasted_share=round(limited.wasted_steps / max(1, limited.steps), 4),
    )
