"""The physical bound of a task on a machine: compute over all processors, and the bytes that must move."""

from collections import Counter

import numpy as np

from experts.spec import ArchitectureId
from tools.simulate.world import SimulatedMachine, Task


def bound_s(machine: SimulatedMachine, task: Task) -> float:
    """Seconds below which no policy can finish: the largest of compute, disk and the span of the arrivals.

    Disk: the distinct bytes that the task uses, less all memory, over the disk's bandwidth.
    """
    disk = next(iter(machine.from_disk.values()))[0]
    used = {expert for image in task.images for expert in image.chain}
    used_bytes = sum(facts.weights_bytes for facts in task.experts if facts.expert in used)
    move_s = max(0.0, used_bytes - machine.memory_bytes) / disk.bytes_per_s
    arrivals_s = max(image.arrived_s for image in task.images)
    return max(compute_s(machine, task), move_s, arrivals_s)


def compute_s(machine: SimulatedMachine, task: Task) -> float:
    """The least time in which the processors, with full batches only, compute everything: a linear programme.

    Variables: requests of each architecture on each processor, and the time T; minimise T so that all requests are
    done and no processor works longer than T.
    """
    from scipy.optimize import linprog

    architectures = {facts.expert: facts.architecture for facts in task.experts}
    counts = Counter(architectures[expert] for image in task.images for expert in image.chain)
    devices = [device for device in machine.concurrency if any(facts.device == device for facts in machine.pools)]
    cells = [(device, name) for device in devices for name in counts]
    seconds = [_seconds_per_image(machine, device, name) for device, name in cells]
    objective = np.zeros(len(cells) + 1)
    objective[-1] = 1.0
    all_done = np.array([[float(cell[1] == name) for cell in cells] + [0.0] for name in counts])
    in_time = np.array(
        [
            [cost if cell[0] == device else 0.0 for cell, cost in zip(cells, seconds, strict=True)] + [-1.0]
            for device in devices
        ]
    )
    solution = linprog(
        objective,
        A_ub=in_time,
        b_ub=np.zeros(len(devices)),
        A_eq=all_done,
        b_eq=list(counts.values()),
        bounds=(0, None),
    )
    return float(solution.fun)


def _seconds_per_image(machine: SimulatedMachine, device: str, architecture: ArchitectureId) -> float:
    row = next(row for row in machine.matrix if (row.device, row.architecture) == (device, architecture))
    device_pools = [facts for facts in machine.pools if facts.device == device]
    batch = max(1, min(row.max_batch, max(facts.max_batch for facts in device_pools)))
    executors = sum(1 for facts in machine.executors if facts.pool in {pool.pool for pool in device_pools})
    together = max(1.0, min(machine.concurrency[device], executors))
    return (row.k_s + row.b_s / batch) / together
