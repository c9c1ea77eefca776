"""The physical bound of a task on a machine: compute over all processors, and the bytes that must move."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from daemon.policy.matrix import Performance
from experts.spec import ArchitectureId
from tools.simulate.world import SimulatedMachine, Task


class Use(NamedTuple):
    """One expert's part in a task."""

    architecture: ArchitectureId
    weights_bytes: int
    images: int


@dataclass(frozen=True, slots=True)
class Bound:
    """The seconds below which no policy can finish a task, by what takes them."""

    compute_s: float
    load_s: float
    arrivals_s: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.load_s, self.arrivals_s)


def task_bound(machine: SimulatedMachine, task: Task) -> Bound:
    """Return the bound of a task on a machine whose memory is full when the first image comes."""
    counts = Counter(expert for image in task.images for expert in image.chain)
    used = [facts for facts in task.experts if facts.expert in counts]
    uses = [Use(facts.architecture, facts.weights_bytes, counts[facts.expert]) for facts in used]
    rows: list[Performance] = []
    together: dict[str, float] = {}
    for device, concurrency in machine.concurrency.items():
        pools = [facts for facts in machine.pools if facts.device == device]
        if pools:
            executors = sum(facts.pool in {pool.pool for pool in pools} for facts in machine.executors)
            together[device] = max(1.0, min(concurrency, executors))
            most = max(facts.max_batch for facts in pools)
            rows += [replace(row, max_batch=min(row.max_batch, most)) for row in machine.matrix if row.device == device]
    disk, *_ = next(iter(machine.from_disk.values()))
    arrivals_s = max(image.arrived_s for image in task.images)
    return bound_of(uses, rows, together, machine.memory_bytes, disk.bytes_per_s, arrivals_s)


def bound_of(
    uses: Sequence[Use],
    rows: Sequence[Performance],
    together: Mapping[str, float],
    memory_bytes: int,
    bytes_per_s: float,
    arrivals_s: float = 0.0,
) -> Bound:
    """Return the bound: every expert's images in the fewest batches, on all devices without a pause; and the distinct
    bytes that are used, less all memory, over the disk's bandwidth. `together`: batches that run at once, by device.
    """
    moved_bytes = max(0, sum(use.weights_bytes for use in uses) - memory_bytes)
    return Bound(_compute_s(uses, rows, together), moved_bytes / bytes_per_s, arrivals_s)


def _compute_s(uses: Sequence[Use], rows: Sequence[Performance], together: Mapping[str, float]) -> float:
    """The least time in which the devices compute everything: a linear programme.

    Variables: of each kind of expert (by architecture and images; equal ones share a best solution) the images and the
    batches on each device, and the time T. Minimise T so that all images are computed, no batch is larger than
    allowed, an expert has at least the batches that its images fill, and no device works longer than T.
    """
    from scipy.optimize import linprog

    kinds = Counter((use.architecture, use.images) for use in uses)
    cells = [(kind, row) for kind in kinds for row in rows if row.architecture == kind[0] and row.device in together]
    of_kind = np.array([[float(each == kind) for each, _ in cells] for kind in kinds])
    on_device = np.array([[float(row.device == device) for _, row in cells] for device in together])
    k_s, b_s, largest = np.array([(row.k_s, row.b_s, row.max_batch) for _, row in cells]).T
    experts, images = np.array([(count, kind[1]) for kind, count in kinds.items()]).T
    fewest = experts * np.ceil(images / (of_kind * largest).max(axis=1))
    no_kind, no_cell, no_device = (np.zeros((len(part), 1)) for part in (of_kind, largest, on_device))
    solution = linprog(
        [*np.zeros(2 * len(cells)), 1.0],
        A_ub=np.block(
            [
                [np.eye(len(cells)), -np.diag(largest), no_cell],
                [np.zeros_like(of_kind), -of_kind, no_kind],
                [on_device * k_s, on_device * b_s, no_device - np.array([[share] for share in together.values()])],
            ]
        ),
        b_ub=[*no_cell[:, 0], *-fewest, *no_device[:, 0]],
        A_eq=np.block([of_kind, np.zeros_like(of_kind), no_kind]),
        b_eq=experts * images,
        bounds=(0, None),
    )
    return float(solution.fun)
