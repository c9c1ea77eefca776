"""The live bound: no scheduler can be faster on what was measured here, whatever it knows of the future."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from daemon.policy.matrix import Performance
from experts.spec import ArchitectureId, ExpertId, ExpertSpec
from tests.bench.workload import Trace


@dataclass(frozen=True, slots=True)
class Bound:
    """`images_per_s` is what the slower of the two leaves possible. Seconds are for the whole trace."""

    compute_s: float
    load_s: float
    images_per_s: float


def live_bound(
    trace: Trace,
    specs: Mapping[ExpertId, ExpertSpec],
    rows: Iterable[Performance],
    *,
    memory_bytes: int,
    bytes_per_s: float,
    executors: int,
) -> Bound:
    """Each expert's images in the fullest batches, on all executors without a pause; and every expert that is used
    but does not fit the memory, which is full at the start, read once.
    """
    costs = {row.architecture: row for row in rows}
    compute_s = 0.0
    needed_bytes = 0
    for expert, images in trace.visits().items():
        spec = specs[ExpertId(expert)]
        row = costs[ArchitectureId(spec.layout)]
        compute_s += images * row.k_s + math.ceil(images / row.max_batch) * row.b_s
        needed_bytes += spec.weights_bytes
    compute_s /= executors
    load_s = max(0, needed_bytes - memory_bytes) / bytes_per_s
    return Bound(compute_s, load_s, len(trace.asks) / max(compute_s, load_s))
