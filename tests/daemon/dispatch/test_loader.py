"""The contract of a pool's loads, held by threads over real slots and by the simulated pool."""

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from daemon.dispatch.channels import Channels
from daemon.dispatch.pool import LoadEnd, Pool, ThreadedPool
from daemon.dispatch.simulated import SimulatedClock, SimulatedMemory, SimulatedPool
from daemon.policy.actions import Load
from daemon.policy.request import RAM, PoolId
from experts.spec import Answer, ExpertSpec
from experts.vision.slot import SlotPool
from tests.daemon.dispatch.simulated_channels import SimulatedChannels
from tests.experts.samples import an_expert_file

pytestmark = pytest.mark.not_fast("computes with torch")

CPU = PoolId("cpu")


@dataclass
class Bench:
    """Pools with their memories, and the ends of their loads."""

    pools: dict[PoolId, Pool]
    memories: dict[PoolId, Any]
    clock: SimulatedClock | None
    ends: "queue.SimpleQueue[LoadEnd]" = field(default_factory=queue.SimpleQueue)

    def load(self, spec: ExpertSpec, *evict: ExpertSpec, pool: PoolId = CPU, source: PoolId | None = None) -> None:
        load = Load(pool, spec.expert, tuple(victim.expert for victim in evict), "demand", source)
        self.pools[pool].load(load, spec, self.ends.put)

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
    budget_bytes, names = 2 * specs[0].weights_bytes, (RAM, CPU)
    memories: dict[PoolId, Any]
    if request.param == "real":
        memories, channels = {name: SlotPool(name, budget_bytes) for name in names}, Channels()
        bench = Bench(
            {name: ThreadedPool(name, (), memories[name], channels, memories) for name in names}, memories, None
        )
    else:
        memories, clock = {name: SimulatedMemory(budget_bytes) for name in names}, SimulatedClock()
        route = SimulatedChannels(clock, 0.5, 0.1).route
        pools: dict[PoolId, Pool] = {
            name: SimulatedPool(name, memories[name], clock, route, lambda *_: Answer(None, None), sources=memories)
            for name in names
        }
        bench = Bench(pools, memories, clock)
    for pool in bench.pools.values():
        pool.start()
    yield bench
    assert all(pool.stop(60.0) for pool in bench.pools.values())
    for memory in memories.values():
        assert memory.used_bytes <= memory.budget_bytes


def test_orders_are_carried_out_in_order_within_the_budget(bench: Bench, specs: list[ExpertSpec]):
    bench.load(specs[0])
    bench.load(specs[1])
    ends = bench.wait(2)
    bench.load(specs[2], specs[0])
    bench.pools[CPU].unload((specs[1].expert,))
    bench.pools[CPU].resize(specs[0].weights_bytes)
    ends += bench.wait(1)
    bench.load(specs[1], specs[2])
    ends += bench.wait(1)
    assert [end.error for end in ends] == [None] * 4
    assert bench.memories[CPU].resident() == (specs[1].expert,)
    assert bench.pools[CPU].budget_bytes == specs[0].weights_bytes


def test_a_failed_load_is_reported_and_what_it_evicted_stays_evicted(
    bench: Bench, specs: list[ExpertSpec], tmp_path: Path
):
    missing, memory = replace(specs[2], file=tmp_path / "gone"), bench.memories[CPU]
    if isinstance(memory, SimulatedMemory):
        memory.broken[missing.expert] = "no such file"
    bench.load(specs[0])
    ends = bench.wait(1)
    bench.load(missing, specs[0])
    bench.load(specs[1])
    ends += bench.wait(2)
    assert ends[1].error is not None
    assert missing.expert in ends[1].error
    assert [ends[0].error, ends[2].error] == [None, None]
    assert memory.resident() == (specs[1].expert,)


def test_an_expert_in_host_memory_is_copied_from_there(bench: Bench, specs: list[ExpertSpec]):
    bench.load(specs[0], pool=RAM)
    ends = bench.wait(1)
    bench.load(specs[0], source=RAM)
    ends += bench.wait(1)
    assert [(end.error, end.tier, end.bytes) for end in ends] == [
        (None, "disk", specs[0].weights_bytes),
        (None, "ram", specs[0].weights_bytes),
    ]
    assert bench.memories[RAM].resident() == bench.memories[CPU].resident() == (specs[0].expert,)
