"""`coserve-plus` with several kinds of memory: the RAM tier, the CPU's pool as a source, slow processors."""

from daemon.policy.actions import Load
from daemon.policy.matrix import Performance
from daemon.policy.paper.assign import partition
from daemon.policy.presets import preset
from daemon.policy.request import RAM, PoolFacts, PoolId
from daemon.policy.scheduler import Scheduler
from experts.spec import ArchitectureId, ExpertId
from tests.daemon.policy.line import Clockwork, a_pool, a_request, an_expert, executors_on

GPU, CPU = PoolId("cuda:0"), PoolId("cpu")
MATRIX = (
    Performance("cuda:0", ArchitectureId("resnet18"), k_s=0.1, b_s=0.1, max_batch=8, disk_s=1.0, ram_s=0.1),
    Performance("cpu", ArchitectureId("resnet18"), k_s=0.4, b_s=0.1, max_batch=4, disk_s=1.0),
)


def a_machine(*pools: PoolFacts, experts: str = "abcd", executors: tuple[str, ...] = ("cuda:0",)) -> Clockwork:
    facts = [an_expert(name, usage=0.0) for name in experts]
    rules = preset("coserve-plus")
    shares, used = partition(pools, executors_on(*executors), rules)
    return Clockwork(Scheduler(facts, shares, used, rules, None, MATRIX), used)


def a_ram(budget_bytes: int) -> PoolFacts:
    return PoolFacts(RAM, "ram", budget_bytes, 1)


def load_of(scheduler: Scheduler, pool: PoolId, now_s: float) -> Load:
    """Return the load that the scheduler decides on now."""
    action = scheduler.next_load(pool, now_s)
    assert isinstance(action, Load)
    return action


def test_the_ram_tier_takes_what_the_gpu_has_no_room_for_and_the_gpu_copies_it():
    line = a_machine(a_pool("cuda:0", 10), a_ram(20))
    line.arrive(*(a_request(n, "aab"[n]) for n in range(3)))
    line.run()
    copied = [load for load in line.loads() if load.pool == GPU and load.source == RAM]
    assert [load.expert for load in copied] == ["b"]
    assert len(line.ran) == 3


def test_an_idle_gpu_copies_what_the_cpu_has_rather_than_reading_it():
    line = a_machine(a_pool("cuda:0", 20), a_pool("cpu", 20, 4), executors=("cuda:0", "cpu"))
    scheduler = line.scheduler
    scheduler.arrive(a_request(0, "a"), 0.0)
    load = load_of(scheduler, CPU, 0.0)
    scheduler.load_done(load, 1.0)
    copy = load_of(scheduler, GPU, 1.0)
    assert (copy.expert, copy.source) == ("a", CPU)


def test_a_device_error_fails_requests_only_where_no_other_device_takes_their_expert():
    line = a_machine(a_pool("cuda:0", 10), a_pool("cpu", 10, 4), experts="a", executors=("cuda:0", "cpu"))
    scheduler = line.scheduler
    scheduler.arrive(a_request(1, "a"), 0.0)
    first = load_of(scheduler, GPU, 0.0)
    assert scheduler.load_failed(first, "CUDA error", 1.0, True) == ()
    second = load_of(scheduler, CPU, 1.0)
    assert [request.request_id for request in scheduler.load_failed(second, "CUDA error", 2.0, True)] == [1]
    assert scheduler.arrive(a_request(2, "a"), 2.0) == "CUDA error"


def test_a_cpu_with_nothing_to_do_helps_with_the_gpus_longest_queue():
    line = a_machine(a_pool("cuda:0", 10), a_pool("cpu", 10, 4), experts="a", executors=("cuda:0", "cpu"))
    line.arrive(*(a_request(n, "a") for n in range(60)))
    line.run()
    assert {run.executor for run in line.runs()} == {"cuda:0/0", "cpu/1"}
    assert len(line.ran) == 60


def test_where_the_disk_binds_small_groups_are_finished_first_so_that_memory_is_freed():
    line = a_machine(a_pool("cuda:0", 20, 4), experts="abcdefgh")
    line.arrive(*(a_request(n, "a") for n in range(8)))
    line.arrive(*(a_request(10 + n, "b") for n in range(3)))
    line.arrive(*(a_request(20 + n, "cdefgh"[n]) for n in range(6)))
    line.run()
    last_of = {run.expert: place for place, run in enumerate(line.runs())}
    assert last_of["b"] < last_of["a"]
    assert len(line.ran) == 17


def test_beside_a_gpu_the_cpu_takes_the_smallest_batch():
    line = a_machine(a_pool("cuda:0", 5), a_pool("cpu", 20, 4), experts="ab", executors=("cuda:0", "cpu"))
    for expert in "ab":
        line.scheduler.pin(ExpertId(expert), CPU)
    line.turn()
    line.run()
    line.arrive(*(a_request(n, "aaab"[n], 50.0) for n in range(4)))
    line.run()
    assert [run.expert for run in line.runs()] == ["b", "a"]
