"""The contract of a loader, held by the thread over a real slot pool and by the simulated one."""

import queue
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from daemon.dispatch.channels import Channels
from daemon.dispatch.loader import PoolLoader
from daemon.dispatch.orders import LoadEnd, Loader, LoadOrder
from daemon.dispatch.simulated import SimulatedClock, SimulatedLoader, SimulatedPool
from daemon.policy.actions import Load, Resize, Unload
from daemon.policy.request import RAM, PoolId
from experts.spec import ExpertId, ExpertSpec
from experts.vision.slot import SlotPool
from tests.daemon.dispatch.simulated_channels import SimulatedChannels
from tests.experts.samples import an_expert_file

pytestmark = pytest.mark.not_fast("computes with torch")

CPU = PoolId("cpu")


@dataclass
class Bench:
    """A loader, its pool, and how to wait for `count` reports."""

    loader: Loader
    pool: Any
    ends: "queue.SimpleQueue[LoadEnd]"
    clock: SimulatedClock | None

    def wait(self, count: int) -> list[LoadEnd]:
        while self.clock is not None and self.clock.step():
            pass
        return [self.ends.get(timeout=60.0) for _ in range(count)]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[ExpertSpec]:
    folder = tmp_path_factory.mktemp("weights")
    return [an_expert_file(folder, f"y{seed}", "yolov8n", 2, seed) for seed in range(3)]


@pytest.fixture(params=["real", "fake"])
def bench(request: pytest.FixtureRequest, specs: list[ExpertSpec]) -> Iterator[Bench]:
    budget_bytes = 2 * specs[0].weights_bytes
    ends: queue.SimpleQueue[LoadEnd] = queue.SimpleQueue()
    if request.param == "real":
        pool: Any = SlotPool("cpu", budget_bytes)
        loader: Loader = PoolLoader(CPU, pool)
        bench = Bench(loader, pool, ends, None)
    else:
        clock = SimulatedClock()
        pool = SimulatedPool(budget_bytes)
        loader = SimulatedLoader(CPU, pool, SimulatedChannels(clock, 0.5).route)
        bench = Bench(loader, pool, ends, clock)
    loader.start(ends.put)
    yield bench
    assert loader.stop(60.0)
    pool.check()


def an_order(spec: ExpertSpec, *evict: ExpertSpec) -> LoadOrder:
    return LoadOrder(Load(CPU, spec.expert, tuple(victim.expert for victim in evict), "demand"), spec)


def test_orders_are_carried_out_in_order_within_the_budget(bench: Bench, specs: list[ExpertSpec]):
    bench.loader.apply(an_order(specs[0]))
    bench.loader.apply(an_order(specs[1]))
    ends = bench.wait(2)
    bench.loader.apply(an_order(specs[2], specs[0]))
    bench.loader.apply(Unload(CPU, (specs[1].expert,)))
    bench.loader.apply(Resize(CPU, specs[0].weights_bytes))
    ends += bench.wait(1)
    bench.loader.apply(an_order(specs[1], specs[2]))
    ends += bench.wait(1)
    assert [end.error for end in ends] == [None] * 4
    assert bench.pool.resident() == (specs[1].expert,)
    assert bench.pool.budget_bytes == specs[0].weights_bytes


def test_a_failed_load_is_reported_and_what_it_evicted_stays_evicted(
    bench: Bench, specs: list[ExpertSpec], tmp_path: Path
):
    missing = replace(specs[2], file=tmp_path / "gone")
    if isinstance(bench.pool, SimulatedPool):
        bench.pool.broken[missing.expert] = "no such file"
    bench.loader.apply(an_order(specs[0]))
    ends = bench.wait(1)
    bench.loader.apply(an_order(missing, specs[0]))
    bench.loader.apply(an_order(specs[1]))
    ends += bench.wait(2)
    assert ends[1].error is not None
    assert missing.expert in ends[1].error
    assert [ends[0].error, ends[2].error] == [None, None]
    assert bench.pool.resident() == (specs[1].expert,)


@pytest.mark.parametrize("kind", ["real", "fake"])
def test_an_expert_in_host_memory_is_copied_from_there(kind: str, specs: list[ExpertSpec]):
    budget_bytes, clock = specs[0].weights_bytes, SimulatedClock()
    ends: queue.SimpleQueue[LoadEnd] = queue.SimpleQueue()
    pools: dict[PoolId, Any]
    if kind == "real":
        pools = {name: SlotPool(name, budget_bytes) for name in (RAM, CPU)}
        channels = Channels()
        loaders: list[Loader] = [PoolLoader(name, pool, channels, pools) for name, pool in pools.items()]
    else:
        pools = {name: SimulatedPool(budget_bytes) for name in (RAM, CPU)}
        simulated = SimulatedChannels(clock, 0.5, 0.1)
        loaders = [SimulatedLoader(name, pool, simulated.route, pools) for name, pool in pools.items()]
    for loader in loaders:
        loader.start(ends.put)
    spec, loads = specs[0], list[LoadEnd]()
    copy = LoadOrder(Load(CPU, spec.expert, (), "demand", source=RAM), spec)
    for loader, order in zip(loaders, (LoadOrder(Load(RAM, spec.expert, (), "demand"), spec), copy), strict=True):
        loader.apply(order)
        while clock.step():
            pass
        loads.append(ends.get(timeout=60.0))
    assert [(end.error, end.tier, end.bytes) for end in loads] == [
        (None, "disk", spec.weights_bytes),
        (None, "ram", spec.weights_bytes),
    ]
    assert pools[RAM].resident() == pools[CPU].resident() == (spec.expert,)
    assert all(loader.stop(60.0) for loader in loaders)


def test_a_defect_of_the_pool_is_reported_and_evicts_what_the_ledger_gave_up(specs: list[ExpertSpec]):
    class Defect(SimulatedPool):
        def load(self, spec: ExpertSpec, evict: tuple[ExpertId, ...] = (), source: SimulatedPool | None = None) -> Any:
            if spec is specs[1]:
                raise ZeroDivisionError("a defect")
            return super().load(spec, evict, source)

    pool, ends = Defect(1 << 40), queue.SimpleQueue[LoadEnd]()
    loader = PoolLoader(CPU, pool)
    loader.start(ends.put)
    loader.apply(an_order(specs[0]))
    assert ends.get(timeout=60).error is None
    loader.apply(an_order(specs[1], specs[0]))
    assert ends.get(timeout=60).error == "ZeroDivisionError: a defect"
    assert pool.resident() == ()
    assert loader.stop(60.0)
