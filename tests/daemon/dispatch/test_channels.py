"""One transfer at a time on a channel, demand before prefetch before the first fill, and no load waits for ever."""

import threading
import time
from dataclasses import dataclass, field

import pytest

from daemon.dispatch.channels import Channel, Channels
from daemon.dispatch.loader import PoolLoader
from daemon.dispatch.orders import BatchReport, LoadEnd, LoadOrder
from daemon.dispatch.running_work import HungLoad, RunningWork
from daemon.dispatch.simulated import SimulatedClock, SimulatedLoader, SimulatedPool
from daemon.policy.actions import Cause, Load, Resize, Unload
from daemon.policy.request import RAM, PoolId
from experts.spec import ExpertId
from tests.daemon.dispatch.simulated_channels import SimulatedChannels
from tests.daemon.dispatch.simulated_line import a_spec

CPU, OTHER, GPU = PoolId("cpu/0"), PoolId("cpu/1"), PoolId("cuda:0")


def an_order(pool: PoolId, name: str, cause: Cause, *evict: str, source: PoolId | None = None) -> LoadOrder:
    victims = tuple(ExpertId(victim) for victim in evict)
    return LoadOrder(Load(pool, ExpertId(name), victims, cause, source), a_spec(name))


A_LOAD = an_order(CPU, "x", "demand").load


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


def test_the_last_to_close_a_channel_gives_up_what_waits() -> None:
    channel, begun, go_on, late = Channel("disk"), threading.Event(), threading.Event(), threading.Event()

    def transfer() -> None:
        begun.set()
        assert go_on.wait(60.0)

    channel.open()
    channel.open()
    channel.transfer(A_LOAD, transfer, unheard)
    assert begun.wait(60.0)
    channel.transfer(A_LOAD, late.set, unheard)
    assert channel.close(0.0)
    assert not channel.close(0.01)
    go_on.set()
    channel._thread.join(60.0)
    assert not late.is_set()


def test_a_load_that_has_ended_is_never_watched_again_however_soon_its_end_is_heard() -> None:
    now_s, patience_s = time.monotonic(), 1000.0
    both_are_known = threading.Event()
    loader = PoolLoader(CPU, SimulatedPool(30, lambda _spec: float(not both_are_known.wait(60.0))), Channels())
    work = RunningWork([], [loader], patience_s, lambda: now_s)
    first, waiting = an_order(CPU, "first", "demand"), an_order(CPU, "waiting", "startup")
    reports: list[tuple[bool, list[HungLoad], float | None]] = []
    done = threading.Event()

    def ask_the_drive_at_once(end: BatchReport | LoadEnd) -> None:
        """Ask in the thread of the channel, which stands still at its report meanwhile."""
        assert isinstance(end, LoadEnd)
        if end.load == first.load:
            was_hung, checks_s = work.load_ended(end), [now_s + number * patience_s / 30 for number in range(40)]
            hung = [load for check_s in checks_s for load in work.hung_loads(check_s)]
            reports.append((was_hung, hung, work.next_check_s(now_s)))
        elif work.load_ended(end) or work.hung_loads(now_s) or work.next_check_s(now_s) is not None:
            raise AssertionError(end)
        else:
            done.set()

    work.start(ask_the_drive_at_once)
    work.change(CPU, first)
    work.change(CPU, waiting)
    both_are_known.set()
    assert done.wait(60.0)
    assert work.stop(now_s + 60.0)
    assert reports == [(False, [], now_s + patience_s / 30)]


@dataclass
class Machine:
    """Pools whose loads take a second from disk and a tenth from memory, and the order in which they ended."""

    clock: SimulatedClock = field(default_factory=SimulatedClock)
    pools: dict[PoolId, SimulatedPool] = field(default_factory=dict)
    loaders: dict[PoolId, SimulatedLoader] = field(default_factory=dict)
    ends: list[tuple[str, float, str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        channels = SimulatedChannels(self.clock, 1.0, 0.1)
        for pool in (CPU, OTHER, GPU, RAM):
            self.pools[pool] = SimulatedPool(30)
            self.loaders[pool] = SimulatedLoader(pool, self.pools[pool], channels.route, self.pools)
            self.loaders[pool].start(self._ended)

    def _ended(self, end: LoadEnd) -> None:
        self.ends.append((end.load.expert, round(self.clock.now(), 6), end.error))

    def run(self) -> list[tuple[str, float]]:
        while self.clock.step():
            for pool in self.pools.values():
                pool.check()
        assert all(error is None for _, _, error in self.ends)
        return [(expert, at_s) for expert, at_s, _ in self.ends]


def fill(machine: Machine, *names: str) -> None:
    """Residents of the CPU's first pool; then the disk is busy, so that what comes next must wait."""
    for name in names:
        machine.loaders[CPU].apply(an_order(CPU, name, "startup"))
    machine.run()
    machine.ends.clear()
    machine.loaders[OTHER].apply(an_order(OTHER, "busy", "demand"))


def test_loads_that_change_their_order_never_exceed_the_budget() -> None:
    machine = Machine()
    fill(machine, "A", "B", "C")
    # Decided in this order by the ledger; the demand goes first, with the room that B gave up for it.
    machine.loaders[CPU].apply(an_order(CPU, "D", "prefetch", "A"))
    machine.loaders[CPU].apply(an_order(CPU, "E", "demand", "B"))
    machine.loaders[CPU].apply(Unload(CPU, (ExpertId("C"),)))
    machine.loaders[CPU].apply(Resize(CPU, 20))
    assert [expert for expert, _ in machine.run()] == ["busy", "E", "D"]
    assert machine.pools[CPU].resident() == (ExpertId("E"), ExpertId("D"))
    assert machine.pools[CPU].budget_bytes == 20


@pytest.mark.parametrize("cause", ["demand", "prefetch"])
def test_threads_and_the_simulation_make_the_same_order(cause: Cause) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended: list[str] = []
    all_ended = threading.Semaphore(0)

    class Slow(SimulatedPool):
        def load(self, spec, evict=(), source=None):  # type: ignore[no-untyped-def]
            if spec.expert == "first":
                begun.set()
                assert go_on.wait(60.0)
            return super().load(spec, evict, source)

    def report(end: LoadEnd) -> None:
        ended.append(end.load.expert)
        all_ended.release()

    channels = Channels()
    loaders = {pool: PoolLoader(pool, Slow(30), channels) for pool in (CPU, OTHER)}
    for loader in loaders.values():
        loader.start(report)
    orders = [an_order(CPU, "first", "demand"), an_order(CPU, "fill", "startup"), an_order(OTHER, "late", cause)]
    loaders[CPU].apply(orders[0])
    assert begun.wait(60.0)
    loaders[CPU].apply(orders[1])
    loaders[OTHER].apply(orders[2])
    go_on.set()
    assert all(all_ended.acquire(timeout=60.0) for _ in orders)
    assert all(loader.stop(60.0) for loader in loaders.values())
    machine = Machine()
    for order in orders:
        machine.loaders[order.load.pool].apply(order)
    assert ended == [expert for expert, _ in machine.run()] == ["first", "late", "fill"]
