"""One transfer at a time on a channel, demand before prefetch before the first fill, and no load waits for ever."""

import threading
from dataclasses import dataclass, field

import pytest

from daemon.dispatch.channels import Channel, Channels
from daemon.dispatch.pool import LoadEnd, ThreadedPool
from daemon.dispatch.simulated import SimulatedClock, SimulatedMemory, SimulatedPool
from daemon.policy.actions import Cause, Load
from daemon.policy.request import RAM, PoolId
from experts.spec import Answer, ExpertId, ExpertSpec
from tests.daemon.dispatch.simulated_channels import SimulatedChannels
from tests.daemon.dispatch.simulated_line import a_spec

CPU, OTHER, GPU = PoolId("cpu/0"), PoolId("cpu/1"), PoolId("cuda:0")


def a_load(pool: PoolId, name: str, cause: Cause, *evict: str, source: PoolId | None = None) -> Load:
    return Load(pool, ExpertId(name), tuple(ExpertId(victim) for victim in evict), cause, source)


A_LOAD = a_load(CPU, "x", "demand")


def unheard(_answer: object) -> None:
    pass


def test_transfers_of_a_channel_never_overlap() -> None:
    channel, lock, done = Channel("disk"), threading.Lock(), threading.Semaphore(0)
    overlaps: list[bool] = []

    def transfer() -> None:
        overlaps.append(not lock.acquire(blocking=False))
        if not overlaps[-1]:
            lock.release()
        done.release()

    channel.open()
    callers = [
        threading.Thread(target=lambda: [channel.transfer(A_LOAD, transfer, unheard) for _ in range(20)]) for _ in "ab"
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(done.acquire(timeout=60.0) for _ in range(40))
    assert channel.close(60.0)
    assert not any(overlaps)


def test_a_transfer_that_fails_by_a_defect_leaves_the_channel_in_service() -> None:
    channel, done = Channel("disk"), threading.Event()

    def defect() -> None:
        raise ZeroDivisionError

    channel.open()
    channel.transfer(A_LOAD, defect, unheard)
    channel.transfer(A_LOAD, done.set, unheard)
    assert done.wait(60.0)
    assert channel.close(60.0)


@dataclass
class Machine:
    """Pools whose loads take a second from disk and a tenth from memory, and the order in which they ended."""

    clock: SimulatedClock = field(default_factory=SimulatedClock)
    pools: dict[PoolId, SimulatedPool] = field(default_factory=dict)
    ends: list[tuple[str, float, str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        channels = SimulatedChannels(self.clock, 1.0, 0.1)
        for pool in (CPU, OTHER, GPU, RAM):
            memory = SimulatedMemory(30)
            self.pools[pool] = SimulatedPool(pool, memory, self.clock, channels.route, lambda *_: Answer(None, None))

    def load(self, load: Load) -> None:
        self.pools[load.pool].load(load, a_spec(load.expert), self._ended)

    def _ended(self, end: LoadEnd) -> None:
        self.ends.append((end.load.expert, round(self.clock.now(), 6), end.error))

    def run(self) -> list[tuple[str, float]]:
        while self.clock.step():
            for pool in self.pools.values():
                assert pool.memory.used_bytes <= pool.memory.budget_bytes
        assert all(error is None for _, _, error in self.ends)
        return [(expert, at_s) for expert, at_s, _ in self.ends]


def fill(machine: Machine, *names: str) -> None:
    """Residents of the CPU's first pool; then the disk is busy, so that what comes next must wait."""
    for name in names:
        machine.load(a_load(CPU, name, "startup"))
    machine.run()
    machine.ends.clear()
    machine.load(a_load(OTHER, "busy", "demand"))


def test_loads_that_change_their_order_never_exceed_the_budget() -> None:
    machine = Machine()
    fill(machine, "A", "B", "C")
    # Decided in this order by the ledger; the demand goes first, with the room that B gave up for it.
    machine.load(a_load(CPU, "D", "prefetch", "A"))
    machine.load(a_load(CPU, "E", "demand", "B"))
    machine.pools[CPU].unload((ExpertId("C"),))
    machine.pools[CPU].resize(20)
    assert [expert for expert, _ in machine.run()] == ["busy", "E", "D"]
    assert machine.pools[CPU].memory.resident() == (ExpertId("E"), ExpertId("D"))
    assert machine.pools[CPU].budget_bytes == 20


@pytest.mark.parametrize("cause", ["demand", "prefetch"])
def test_threads_and_the_simulation_make_the_same_order(cause: Cause) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended: list[str] = []
    all_ended = threading.Semaphore(0)

    def read(spec: ExpertSpec) -> None:
        if spec.expert == "first":
            begun.set()
            assert go_on.wait(60.0)

    def report(end: LoadEnd) -> None:
        ended.append(end.load.expert)
        all_ended.release()

    channels = Channels()
    pools = {pool: ThreadedPool(pool, (), SimulatedMemory(30, read), channels) for pool in (CPU, OTHER)}
    for pool in pools.values():
        pool.start()
    loads = [a_load(CPU, "first", "demand"), a_load(CPU, "fill", "startup"), a_load(OTHER, "late", cause)]
    for load in loads:
        pools[load.pool].load(load, a_spec(load.expert), report)
        assert begun.wait(60.0)
    go_on.set()
    assert all(all_ended.acquire(timeout=60.0) for _ in loads)
    assert all(pool.stop(60.0) for pool in pools.values())
    machine = Machine()
    for load in loads:
        machine.load(load)
    assert ended == [expert for expert, _ in machine.run()] == ["first", "late", "fill"]
