"""Microbenchmarks of a layout, measured once with any of its experts, on one device (CoServe §4.5)."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, Self, TypeVar

import torch

from daemon.dispatch.torch_devices import set_threads
from daemon.policy.matrix import Performance
from experts.reading import drop_cached
from experts.spec import ArchitectureId, ExpertSpec
from experts.vision.graphs import WARM_UPS, GraphedNetwork
from experts.vision.infer import infer
from experts.vision.packing import BATCHES_BEFORE, PackingNetwork
from experts.vision.slot import LayoutShelf, Slot, SlotPool
from tools.profile.samples import Samples
from tools.simulate.fit import fit_line, largest_useful_batch
from tools.terminal.console import CommandError

T = TypeVar("T")

#: Executors of a GPU that are tried; more streams than this never paid on the paper's GPUs (figure 17).
_GPU_EXECUTORS = (1, 2, 3, 4)
#: Images of the batches with which executors are compared.
_BATCH = 4

#: Batch sizes to measure, up to the largest asked for: dense where the time per image still falls.
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class ProfileError(CommandError):
    """This line cannot be profiled here; the text says why and what to do."""


def _no_memory(device: str, images: str, spec: ExpertSpec) -> ProfileError:
    remedy = "stop what else uses the device, or import the expert with a smaller --input-size"
    return ProfileError(f"{device}: has no memory for {images} of {spec.name} beside the weights; {remedy}")


@dataclass(frozen=True, slots=True)
class ProfileEffort:
    """Each pair of executors × threads runs for `seconds`, in `pair_rounds` parts."""

    max_batch: int = 16
    rounds: int = 5
    loads: int = 5
    pair_rounds: int = 3
    seconds: float = 1.5

    @property
    def batches(self) -> tuple[int, ...]:
        return (*(size for size in BATCH_SIZES if size < self.max_batch), self.max_batch)


QUICK = ProfileEffort(max_batch=4, rounds=2, loads=2, pair_rounds=1, seconds=0.2)


@dataclass(frozen=True, slots=True)
class LayoutCost:
    """One layout on one device: median latencies by batch size, the line fitted to them, its largest relative error."""

    row: Performance
    latencies_s: Mapping[int, float]
    residual: float


class Bench:
    """Benchmark several executors of one device running concurrently: figures include their contention."""

    def __init__(self, device: str, executors: int, threads: int, shelf: LayoutShelf) -> None:
        self._device, self._executors, self._shelf = device, executors, shelf
        self._start = threading.Barrier(executors)
        self._pool = ThreadPoolExecutor(executors, f"profile {device}", set_threads, (threads,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._start.abort()
        self._pool.shutdown()

    def slots(self, spec: ExpertSpec) -> list[Slot]:
        """Load the expert into a slot of each executor. Raises ExpertError."""
        slots: list[Slot] = []
        for _ in range(self._executors):
            pool = SlotPool(self._device, spec.weights_bytes, self._shelf)
            pool.load(spec)
            slots.append(pool.slot(spec.expert))
        return slots

    def latencies_s(
        self, slots: Sequence[Slot], samples: Samples, batches: Sequence[int], rounds: int
    ) -> dict[int, float]:
        """Return median seconds by batch size, payloads to answers, interleaved; ends at a size without memory."""
        taken: dict[int, list[float]] = {}
        fitting = list(batches)
        for number in range(-self.warm_ups(slots[0]), rounds):
            for size in fitting:
                try:
                    seconds = self._together(slots, lambda slot, size=size: self.timed(slot, samples, size))
                except torch.OutOfMemoryError:
                    fitting = [smaller for smaller in fitting if smaller < size]
                    taken.pop(size, None)
                    break
                if number >= 0:
                    taken.setdefault(size, []).extend(seconds)
        return {size: median(seconds) for size, seconds in taken.items() if size in fitting}

    def images_per_s(self, slots: Sequence[Slot], samples: Samples, size: int, seconds: float) -> float:
        """Return the images/s of all executors together, with batches of `size`, over about `seconds`."""

        def work(slot: Slot) -> tuple[int, float]:
            begin_s, images = time.perf_counter(), 0
            while (elapsed_s := time.perf_counter() - begin_s) < seconds or not images:
                self.timed(slot, samples, size)
                images += size
            return images, elapsed_s

        for _ in range(self.warm_ups(slots[0])):
            self._together(slots, lambda slot: self.timed(slot, samples, size))
        return sum(images / elapsed_s for images, elapsed_s in self._together(slots, work))

    def warm_ups(self, slot: Slot) -> int:
        return warm_ups(slot)

    def timed(self, slot: Slot, samples: Samples, size: int) -> float:
        """Return the seconds of one batch as an executor runs it: decode, fit, compute."""
        begin_s = time.perf_counter()
        infer(slot, samples.prepared(slot.spec, size))
        return time.perf_counter() - begin_s

    def _together(self, slots: Sequence[Slot], work: Callable[[Slot], T]) -> list[T]:
        def begin(slot: Slot) -> T:
            self._start.wait()
            return work(slot)

        return [future.result() for future in [self._pool.submit(begin, slot) for slot in slots]]


def measure_layout(
    bench: Bench, device: str, spec: ExpertSpec, samples: Samples, effort: ProfileEffort, shelf: LayoutShelf
) -> LayoutCost:
    """Measure one row of the matrix: a layout, with one of its experts. Raises ExpertError, ProfileError."""
    slots = bench.slots(spec)
    latencies_s = bench.latencies_s(slots, samples, effort.batches, effort.rounds)
    if not latencies_s:
        raise _no_memory(device, "one image", spec)
    line = fit_line(latencies_s.items())
    max_batch = largest_useful_batch(line, max(latencies_s))
    # Some is needed once for a batch of any size (oneDNN reorders the weights of a layer), so it is shared out over the
    # largest one: memory for that holds every smaller batch, too.
    activation_bytes = -(-max(peak_bytes(slots[0], samples, size) for size in {1, max_batch}) // max_batch)
    del slots
    disk_s, ram_s = load_seconds(device, spec, effort.loads, shelf)
    layout = ArchitectureId(spec.layout)
    row = Performance(device, layout, line.k_s, line.b_s, max_batch, activation_bytes, disk_s, ram_s)
    return LayoutCost(row, latencies_s, line.residual)


def warm_ups(slot: Slot) -> int:
    """Return the runs before timing: kernels are chosen, memory taken, weights packed and batches recorded."""
    if isinstance(slot.module, PackingNetwork):
        return BATCHES_BEFORE + 1
    return WARM_UPS + 1 if isinstance(slot.module, GraphedNetwork) else 1


def load_seconds(device: str, spec: ExpertSpec, loads: int, shelf: LayoutShelf) -> tuple[float, float | None]:
    """Return median seconds of a load from disk with a cold page cache, and from host memory if that serves."""
    pool = SlotPool(device, spec.weights_bytes, shelf)
    pool.load(spec)  # The first load checks the file's sha256, later ones do not.

    def load_s(source: SlotPool | None) -> float:
        pool.unload(spec.expert)
        if source is None:
            drop_cached(spec.file)
        return pool.load(spec, source=source).load_ms / 1e3

    disk_s = median(load_s(None) for _ in range(loads))
    if device == "cpu":
        return disk_s, None
    host = SlotPool("ram", spec.weights_bytes, shelf)
    host.load(spec)
    return disk_s, median(load_s(host) for _ in range(loads))


def peak_bytes(slot: Slot, samples: Samples, size: int) -> int:
    """Return the peak bytes of a batch without the weights: its pixels too and, on a GPU, its recording."""
    prepared = samples.prepared(slot.spec, size)
    device = slot.transfer.device
    if device.type != "cuda":
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as record:
            infer(slot, prepared)
        return _peak(record)
    if isinstance(slot.module, GraphedNetwork):
        slot.module.forget()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    # A thread of its own has a stream of its own, as an executor has, and shares no recording's memory.
    with ThreadPoolExecutor(1) as executor:
        for _ in range(warm_ups(slot) + 1):
            executor.submit(infer, slot, prepared).result()
        return max(0, free_bytes - torch.cuda.mem_get_info(device)[0])


def _peak(record: torch.profiler.profile) -> int:
    results: Any = record.profiler.kineto_results if record.profiler is not None else None
    events = [event for event in results.events() if event.name() == "[memory]"] if results is not None else []
    used_bytes = peak_bytes = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        used_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, used_bytes)
    return peak_bytes


@dataclass(frozen=True, slots=True)
class Pair:
    """Executors of one device × intra-op threads of each, and their throughput together."""

    executors: int
    threads: int
    images_per_s: float


def cores() -> int:
    return len(os.sched_getaffinity(0))


def pairs(device: str) -> list[tuple[int, int]]:
    """Return (executors, threads) to try: on the CPU those that use every core, few large ones last."""
    if device != "cpu":
        return [(executors, 1) for executors in _GPU_EXECUTORS]
    return [(cores() // threads, threads) for threads in range(1, cores() + 1) if cores() % threads == 0]


def try_pairs(device: str, spec: ExpertSpec, samples: Samples, effort: ProfileEffort, shelf: LayoutShelf) -> list[Pair]:
    """Return images per second of each pair on one expert, medians of interleaved rounds, fastest first.

    Pairs whose batches the device has no memory for are left out. Raises ProfileError if none is left, ExpertError if
    their experts do not fit the device.
    """
    candidates = pairs(device)
    speeds_of: dict[tuple[int, int], list[float]] = {pair: [] for pair in candidates}
    for _ in range(effort.pair_rounds):
        for executors, threads in candidates:
            with Bench(device, executors, threads, shelf) as bench:
                slots = bench.slots(spec)
                seconds = effort.seconds / effort.pair_rounds
                with suppress(torch.OutOfMemoryError):
                    speeds_of[executors, threads].append(bench.images_per_s(slots, samples, _BATCH, seconds))
    measured = [
        Pair(executors, threads, median(speeds)) for (executors, threads), speeds in speeds_of.items() if speeds
    ]
    if not measured:
        raise _no_memory(device, f"{_BATCH} images", spec)
    return sorted(measured, key=lambda pair: -pair.images_per_s)


def best(measured: Sequence[Pair]) -> Pair:
    """Return the pair with the fewest executors within 2 % of the fastest: each executor takes memory of its own."""
    enough = max(pair.images_per_s for pair in measured) * 0.98
    return min((pair for pair in measured if pair.images_per_s >= enough), key=lambda pair: pair.executors)
