"""The slot cache: serving, eviction, overlapping loads, resizing, and errors."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from experts.moe.cache.slots import SlotCache
from experts.moe.cache.weight_transfer import WeightTransfer
from experts.moe.gating import ExpertKey, ForwardStep, StepRow
from experts.moe.policy.eviction import EvictionPolicy, LayeredLru
from experts.transfer import transfer_for
from tests.experts.moe.cache.shelf import EXPERT_BYTES, Shelf, ShelfArch, number

A_STEP = ForwardStep("decode", ())


class GatedTransfer(WeightTransfer):
    """Loads proceed when the test says so: `allow(n)` lets n of them through."""

    def __init__(self, store: Shelf) -> None:
        super().__init__(store, transfer_for("cpu"))
        self._allowed = threading.Semaphore(0)
        self.began = threading.Event()

    def allow(self, loads: int) -> None:
        self._allowed.release(loads)

    def fill(self, key, place) -> None:
        self.began.set()
        self._allowed.acquire()
        super().fill(key, place)


@contextmanager
def a_cache(
    folder: Path,
    slots: int,
    *,
    arch: ShelfArch = ShelfArch(),  # noqa: B008
    policy: EvictionPolicy | None = None,
    gated: bool = False,
) -> Iterator[tuple[SlotCache, Shelf, GatedTransfer]]:
    shelf = Shelf(folder, arch)
    transfer = GatedTransfer(shelf) if gated else WeightTransfer(shelf, transfer_for("cpu"))
    cache = SlotCache(shelf, slots * EXPERT_BYTES, policy or LayeredLru(arch.layers), transfer)
    try:
        yield cache, shelf, transfer
    finally:
        if gated:
            transfer.allow(1000)
        cache.close()


def once_computing_waits(cache: SlotCache, act: Callable[..., object], *arguments: object) -> None:
    """Call `act` when a thread that computes waits for a missing expert."""

    def wait() -> None:
        while not cache._computing_waits:
            time.sleep(0.001)
        act(*arguments)

    threading.Thread(target=wait, daemon=True).start()


def served(cache: SlotCache, layer: int, experts: list[int], *, ahead: bool = False) -> list[int]:
    """Return the experts served, after checking that each has its own weights."""
    order = []
    for expert, weights in cache.serve(layer, experts, ahead=ahead):
        assert number(weights) == 100 * layer + expert
        cache.check()
        order.append(expert)
    cache.check()
    return order


def keys(layer: int, *experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


def test_an_expert_that_runs_is_never_evicted_for_a_prefetch(tmp_path: Path):
    with a_cache(tmp_path, 2, arch=ShelfArch(layers=1)) as (cache, _, _):
        served(cache, 0, [0, 1])
        for expert, weights in cache.serve(0, [0, 1], ahead=False):
            if expert == 0:
                cache.prefetch(keys(0, 6, 7))
            time.sleep(0.01)
            assert number(weights) == expert
            assert expert in cache.resident(0)
        cache.quiesce()
        assert 7 in cache.resident(0)


def test_a_prefetch_that_is_waited_for_counts_as_blocking_with_its_time(tmp_path: Path):
    with a_cache(tmp_path, 6, gated=True) as (cache, shelf, transfer):
        cache.prefetch(keys(1, 3))
        assert transfer.began.wait(60)
        once_computing_waits(cache, lambda: (time.sleep(0.02), transfer.allow(1)))
        served(cache, 1, [3])
        counts = cache.counts
        assert shelf.order == [(1, 3)]
        assert (counts.fetches_prefetch, counts.fetches_demand, counts.blocking, counts.overlapped) == (1, 0, 1, 0)
        assert counts.wait_s >= 0.02


def test_a_demand_overtakes_prefetches_and_takes_over_its_own(tmp_path: Path):
    with a_cache(tmp_path, 8, gated=True) as (cache, shelf, transfer):
        cache.prefetch(keys(1, 0, 1, 2))
        assert transfer.began.wait(60)  # 1.0 is on its way, 1.1 and 1.2 are not
        once_computing_waits(cache, transfer.allow, 100)
        served(cache, 1, [2])
        cache.quiesce()
        assert shelf.order == [(1, 0), (1, 2), (1, 1)]
        assert cache.counts.fetches_demand == 1


def test_ahead_brings_the_next_expert_while_one_computes(tmp_path: Path):
    with a_cache(tmp_path, 4, arch=ShelfArch(layers=1)) as (cache, _, _):
        for expert, _ in cache.serve(0, [0, 1, 2, 3, 4, 5], ahead=True):
            deadline = time.monotonic() + 60
            while expert < 5 and expert + 1 not in cache.resident(0) and time.monotonic() < deadline:
                time.sleep(0.001)
        counts = cache.counts
        assert (counts.blocking, counts.overlapped, counts.fetches_demand) == (1, 5, 6)


def test_a_guarded_layer_keeps_what_it_has_until_it_was_served(tmp_path: Path):
    with a_cache(tmp_path, 2, arch=ShelfArch(layers=1)) as (cache, _, _):
        cache.preload(keys(0, 0, 1))
        assert cache.resident(0, guard=True) == (0, 1)
        cache.prefetch(keys(0, 6))
        time.sleep(0.02)
        assert served(cache, 0, [0, 1]) == [0, 1]
        cache.quiesce()
        assert cache.resident(0) == (1, 6)
        assert cache.counts.blocking == 0


def disturb(cache: SlotCache, seed: int, stop: threading.Event) -> None:
    """Prefetch and cancel at random until `stop` is set."""
    draw = random.Random(seed)
    while not stop.is_set():
        layer = draw.randrange(3)
        cache.prefetch(keys(layer, *draw.sample(range(8), 3)))
        if draw.random() < 0.2:
            cache.cancel(layer)
        cache.check()


def serve_at_random(cache: SlotCache, steps: int) -> None:
    draw = random.Random(0)
    for _ in range(steps):
        cache.begin_step()
        for layer in range(3):
            wanted = sorted(draw.sample(range(8), draw.randint(1, 8)))
            if draw.random() < 0.3:
                wanted = list(cache.resident(layer, guard=True)) or wanted
            assert served(cache, layer, wanted, ahead=draw.random() < 0.5) == wanted
        cache.end_step(A_STEP)
        if draw.random() < 0.3:
            budget_bytes = draw.randint(1, 24) * EXPERT_BYTES
            cache.resize(budget_bytes)
            assert cache.allocated_bytes <= budget_bytes


def test_while_one_thread_computes_others_may_prefetch(tmp_path: Path):
    stop = threading.Event()
    with a_cache(tmp_path, 8) as (cache, _, _), ThreadPoolExecutor(2) as others:
        disturbing = [others.submit(disturb, cache, seed, stop) for seed in range(2)]
        try:
            serve_at_random(cache, 60)
        finally:
            stop.set()
        for future in disturbing:
            future.result(timeout=60)
        cache.begin_step()
        cache.quiesce()
        cache.check()
        assert cache.pending() == ()
        counts = cache.counts
        assert counts.blocking + counts.overlapped <= counts.fetches


def test_a_steps_counts_belong_to_each_of_its_requests(tmp_path: Path):
    with a_cache(tmp_path, 8) as (cache, _, _):
        for requests, experts in (("a", [1, 2]), ("ab", [2, 3])):
            cache.begin_step()
            served(cache, 0, experts)
            cache.end_step(ForwardStep("decode", tuple(StepRow(request, None, 1) for request in requests)))
        assert [cache.pop_request(request).fetches for request in "abb"] == [3, 1, 0]
