"""Choose a device's executors and the threads of each: try every sensible pair for a moment."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from torch import OutOfMemoryError

from experts.spec import ExpertSpec
from experts.vision.slot import LayoutShelf
from tools.profile.measure import Bench, ProfileEffort, ProfileError
from tools.profile.samples import Samples

#: More streams than this never paid on the paper's GPUs (figure 17).
_GPU_EXECUTORS = (1, 2, 3, 4)
_BATCH = 4


@dataclass(frozen=True, slots=True)
class Pair:
    """Executors of one device × intra-op threads of each, and what they managed together."""

    executors: int
    threads: int
    images_per_s: float


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def pairs(device: str, core_count: int) -> list[tuple[int, int]]:
    """(executors, threads) to try: on the CPU those that use every core, few large ones last."""
    if device != "cpu":
        return [(executors, 1) for executors in _GPU_EXECUTORS]
    return [(core_count // threads, threads) for threads in range(1, core_count + 1) if core_count % threads == 0]


def try_pairs(
    device: str,
    spec: ExpertSpec,
    samples: Samples,
    effort: ProfileEffort,
    shelf: LayoutShelf,
    core_count: int | None = None,
) -> list[Pair]:
    """Images per second of each pair on one expert, medians of interleaved rounds, fastest first.

    Pairs whose batches the device has no memory for are left out. Raises ProfileError if none is left, ExpertError
    where their experts do not fit the device.
    """
    candidates = pairs(device, core_count or cores())
    speeds_of: dict[tuple[int, int], list[float]] = {pair: [] for pair in candidates}
    for _ in range(effort.pair_rounds):
        for executors, threads in candidates:
            with Bench(device, executors, threads, shelf) as bench:
                slots = bench.slots(spec)
                seconds = effort.seconds / effort.pair_rounds
                with suppress(OutOfMemoryError):
                    speeds_of[executors, threads].append(bench.images_per_s(slots, samples, _BATCH, seconds))
    measured = [
        Pair(executors, threads, median(speeds)) for (executors, threads), speeds in speeds_of.items() if speeds
    ]
    if not measured:
        raise ProfileError(
            f"{device}: has no memory for {_BATCH} images of {spec.expert} beside the weights; stop what else uses the"
            " device, or import the expert with a smaller --input-size"
        )
    return sorted(measured, key=lambda pair: -pair.images_per_s)


def best(measured: Sequence[Pair]) -> Pair:
    """The fastest, and of those within 2 % of it the one with the fewest executors: each takes memory of its own."""
    enough = max(pair.images_per_s for pair in measured) * 0.98
    return min((pair for pair in measured if pair.images_per_s >= enough), key=lambda pair: pair.executors)
