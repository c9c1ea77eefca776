"""Divide a device's memory between experts and batches by simulation on the measured matrix (CoServe §4.4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from daemon.policy.matrix import Performance
from daemon.policy.paper.assign import partition
from daemon.policy.presets import preset
from daemon.policy.request import ExecutorFacts, ExecutorId, ExpertFacts, PoolFacts, PoolId
from experts.spec import ExpertId
from tools.simulate.engine import Simulation, StuckError
from tools.simulate.world import SimulatedMachine, Task, TaskImage, TransferChannel

#: Images simulated for each throughput.
SAMPLE_IMAGES = 1500
#: Equally spaced numbers, both ends among them, tried before the search around the best.
_FIRST_POINTS = 9


@dataclass(frozen=True, slots=True)
class Plan:
    """One device, its memory and the experts that share it with batches. `experts` are by descending usage."""

    device: str
    memory_bytes: int
    executors: int
    rows: tuple[Performance, ...]
    experts: tuple[ExpertFacts, ...]
    policy: str

    @property
    def full_batches_bytes(self) -> int:
        """Return the bytes of the largest useful batch of every executor, weights excluded."""
        return self.executors * max(row.max_batch * row.activation_bytes for row in self.rows)

    @property
    def least_batches_bytes(self) -> int:
        """Return the bytes of one image at a time in every executor."""
        return self.executors * max(row.activation_bytes for row in self.rows)

    @property
    def largest_expert_bytes(self) -> int:
        return max(facts.weights_bytes for facts in self.experts)

    def budget_bytes(self, experts: int) -> int:
        """Return the bytes of the `experts` most used experts, at least those of the largest."""
        return max(sum(facts.weights_bytes for facts in self.experts[:experts]), self.largest_expert_bytes)

    def division(self, experts: int) -> tuple[int, int]:
        """Return the bytes for `experts` experts, with what full batches leave over, and for batches."""
        batches_bytes = min(self.memory_bytes - self.budget_bytes(experts), self.full_batches_bytes)
        return self.memory_bytes - batches_bytes, batches_bytes

    def max_experts(self) -> int:
        """Return how many experts fit with one image per executor; 0 if not even one fits."""
        return self._fitting(self.memory_bytes - self.least_batches_bytes)

    def limited_experts(self) -> int:
        """Return how many experts fit beside the largest useful batch of every executor."""
        return self._fitting(max(self.memory_bytes - self.full_batches_bytes, self.largest_expert_bytes))

    def _fitting(self, room_bytes: int) -> int:
        return sum(self.budget_bytes(count) <= room_bytes for count in range(1, len(self.experts) + 1))


@dataclass(frozen=True, slots=True)
class Split:
    """The number of experts to keep, and simulated images per second by number: of all that were tried, the best first.

    `limited` is the number that leaves batches all that they can use, `most` all that fit.
    """

    experts: int
    images_per_s: dict[int, float]
    limited: int
    most: int


def search_split(plan: Plan) -> Split:
    """Choose between the number that leaves full batches their memory (fewer would bring nothing) and all that fit."""
    images = sample_images(plan, SAMPLE_IMAGES)
    limited, most = plan.limited_experts(), plan.max_experts()
    speeds = best_count(lambda count: simulated_images_per_s(plan, plan.division(count)[0], images), limited, most)
    return Split(next(iter(speeds)), speeds, limited, most)


def best_count(throughput: Callable[[int], float], lowest: int, highest: int) -> dict[int, float]:
    """Return throughput by number of experts, the best first: both ends, numbers between, and those around the best.

    Each number is measured once. Of equals the fewest comes first: batches may have what experts do not need.
    """
    speeds: dict[int, float] = {}
    untried = {round(number) for number in np.linspace(lowest, highest, _FIRST_POINTS)}
    while untried:
        speeds |= {number: throughput(number) for number in sorted(untried)}
        best, tried = _ranked(speeds)[0], sorted(speeds)
        place = tried.index(best)
        neighbours = tried[max(place - 1, 0)], tried[min(place + 1, len(tried) - 1)]
        untried = {(best + neighbour) // 2 for neighbour in neighbours} - speeds.keys()
    return {number: speeds[number] for number in _ranked(speeds)}


def _ranked(speeds: dict[int, float]) -> list[int]:
    return sorted(speeds, key=lambda number: (-speeds[number], number))


def simulated_images_per_s(plan: Plan, expert_bytes: int, images: Sequence[TaskImage]) -> float:
    """Return the images/s with `expert_bytes` for experts, the rest for batches; 0 if the policy cannot serve so."""
    each_bytes = (plan.memory_bytes - expert_bytes) // plan.executors
    largest = max(row.max_batch for row in plan.rows)
    pool = PoolFacts(
        PoolId(plan.device),
        "cpu" if plan.device == "cpu" else "gpu",
        expert_bytes,
        largest,
        activation_bytes=each_bytes,
    )
    names = [ExecutorId(f"{plan.device}/{number}") for number in range(plan.executors)]
    pools, executors = partition([pool], [ExecutorFacts(name, pool.pool) for name in names], preset(plan.policy))
    machine = SimulatedMachine(
        pools=pools,
        executors=executors,
        matrix=plan.rows,
        concurrency={plan.device: float(plan.executors)},  # the rows were measured with all executors busy
        from_disk={plan.device: (TransferChannel("disk", _disk_rate(plan), 0.0),)},
        from_ram={},
        memory_bytes=plan.memory_bytes,
    )
    try:
        outcome = Simulation(machine, Task("profile", plan.experts, tuple(images)), plan.policy).run()
    except StuckError:
        return 0.0
    return outcome.answered / outcome.makespan_s if outcome.makespan_s else 0.0


def sample_images(plan: Plan, count: int) -> list[TaskImage]:
    """Draw images by usage, their chains by the shares that go on, arriving as fast as the device computes them.

    If every image arrived at once, extra expert memory would never pay off.
    """
    random = Random(0)
    inflow: dict[ExpertId, float] = {}
    for facts in plan.experts:
        for following, share in facts.then:
            inflow[following] = inflow.get(following, 0.0) + facts.usage * share
    roots = [max(facts.usage - inflow.get(facts.expert, 0.0), 0.0) for facts in plan.experts]
    if not any(roots):
        roots = [1.0] * len(plan.experts)
    by_name = {facts.expert: facts for facts in plan.experts}
    seconds = {row.architecture: row.k_s + row.b_s / row.max_batch for row in plan.rows}
    images: list[TaskImage] = []
    at_s = 0.0
    for facts in random.choices(plan.experts, roots, k=count):
        chain = _chain(facts, by_name, random)
        images.append(TaskImage(at_s, tuple(chain)))
        at_s += sum(seconds[by_name[expert].architecture] for expert in chain) / plan.executors
    return images


def _chain(first: ExpertFacts, by_name: dict[ExpertId, ExpertFacts], random: Random) -> list[ExpertId]:
    chain = [first.expert]
    while (then := by_name[chain[-1]].then) and len(chain) <= len(by_name):
        draw, reached = random.random(), 0.0
        for following, share in then:
            reached += share
            if draw < reached and following in by_name:
                chain.append(following)
                break
        else:
            break
    return chain


def _disk_rate(plan: Plan) -> float:
    seconds = {row.architecture: row.disk_s for row in plan.rows}
    return sum(facts.weights_bytes for facts in plan.experts) / sum(
        seconds[facts.architecture] for facts in plan.experts
    )
