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
    architecture: ArchitectureId
    weights_bytes: int
    images: int


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds on a task's time, in seconds, by cause."""

    compute_s: float
    load_s: float
    arrivals_s: float = 0.0
    #: Includes the network: images cannot be computed on other PCs faster than they arrive there.
    network_s: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.load_s, self.arrivals_s, self.network_s)

    @property
    def cause(self) -> str:
        causes = {"processors": self.compute_s, "disk": self.load_s, "arrivals": self.arrivals_s}
        most = max(causes, key=lambda name: causes[name])
        return "network" if self.network_s > 1.001 * causes[most] else most


def task_bound(machine: SimulatedMachine, task: Task) -> Bound:
    """The machine's memory is full when the first image comes."""
    counts = Counter(expert for image in task.images for expert in image.chain)
    used = [facts for facts in task.experts if facts.expert in counts]
    uses = [Use(facts.architecture, facts.weights_bytes, counts[facts.expert]) for facts in used]
    rows: list[Performance] = []
    together: dict[str, float] = {}
    remote: set[str] = set()
    for device, concurrency in machine.concurrency.items():
        if pools := [facts for facts in machine.pools if facts.device == device]:
            executors = sum(facts.pool in {pool.pool for pool in pools} for facts in machine.executors)
            most = max(facts.max_batch for facts in pools)
            rows += [replace(row, max_batch=min(row.max_batch, most)) for row in machine.matrix if row.device == device]
            together[device] = max(1.0, min(concurrency, executors))
            remote |= {device} if pools[0].host else set()
    # Every expert that is not in memory comes from the line's disk, the first, whichever PC needs it.
    bytes_per_s = next(iter(machine.from_disk.values()))[0].bytes_per_s
    arrivals_s = max(image.arrived_s for image in task.images)
    bound = bound_of(uses, rows, together, machine.memory_bytes, bytes_per_s, arrivals_s)
    if machine.network is None:
        return bound
    image_s = machine.network.image_bytes / machine.network.bytes_per_s
    return replace(bound, network_s=_compute_s(uses, rows, together, dict.fromkeys(remote, image_s)))


def bound_of(
    uses: Sequence[Use],
    rows: Sequence[Performance],
    together: Mapping[str, float],
    memory_bytes: int,
    bytes_per_s: float,
    arrivals_s: float = 0.0,
) -> Bound:
    """Return the bound of every expert's images in the fewest batches, on all devices without a pause, and of the disk.

    The disk must read the distinct bytes used, less all memory. `together`: batches that run at once, by device.
    """
    moved_bytes = max(0, sum(use.weights_bytes for use in uses) - memory_bytes)
    return Bound(_compute_s(uses, rows, together), moved_bytes / bytes_per_s, arrivals_s)


def _compute_s(
    uses: Sequence[Use],
    rows: Sequence[Performance],
    together: Mapping[str, float],
    image_s: Mapping[str, float] | None = None,
) -> float:
    """Return the least time in which the devices compute everything: a linear programme.

    Variables: of each kind of expert (by architecture and images; equal ones share a best solution) the images and the
    batches on each device, and the time T. Minimise T so that all images are computed, no batch is larger than allowed,
    an expert has at least the batches that its images fill, and no device works longer than T; nor does the network,
    which has `image_s` for each image that a device of it computes.
    """
    from scipy.optimize import linprog
    from scipy.sparse import block_array, csr_array, diags_array, eye_array

    kinds = Counter((use.architecture, use.images) for use in uses)
    cells = [(kind, row) for kind in kinds for row in rows if row.architecture == kind[0] and row.device in together]
    of_kind = np.array([[float(each == kind) for each, _ in cells] for kind in kinds])
    on_device = np.array([[float(row.device == device) for _, row in cells] for device in together])
    k_s, b_s, largest = np.array([(row.k_s, row.b_s, row.max_batch) for _, row in cells]).T
    experts, images = np.array([(count, kind[1]) for kind, count in kinds.items()]).T
    fewest = experts * np.ceil(images / (of_kind * largest).max(axis=1))
    sent_s = [[(image_s or {}).get(row.device, 0.0) for _, row in cells]]
    used_s = np.vstack([on_device * k_s, sent_s])
    begun_s = np.vstack([on_device * b_s, np.zeros_like(sent_s)])
    shares = np.array([[share] for share in (*together.values(), 1.0)])
    no_kind, no_cell, no_device = (np.zeros((len(part), 1)) for part in (of_kind, largest, used_s))
    solution = linprog(
        [*np.zeros(2 * len(cells)), 1.0],
        A_ub=block_array(
            [
                [eye_array(len(cells)), diags_array(-largest), csr_array(no_cell)],
                [None, csr_array(-of_kind), csr_array(no_kind)],
                [csr_array(used_s), csr_array(begun_s), csr_array(-shares)],
            ]
        ),
        b_ub=[*no_cell[:, 0], *-fewest, *no_device[:, 0]],
        A_eq=block_array([[csr_array(of_kind), csr_array(of_kind.shape), csr_array(no_kind)]]),
        b_eq=experts * images,
        bounds=(0, None),
    )
    return float(solution.fun)
