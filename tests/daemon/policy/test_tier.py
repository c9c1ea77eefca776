"""Host memory behind GPUs under the paper's policies: read into it, copied from it, kept in it."""

import pytest

from daemon.policy.request import RAM, PoolFacts, PoolId
from experts.spec import ExpertId
from tests.daemon.policy.line import a_pool, an_expert
from tests.daemon.policy.queue_parts import Parts, some_parts

EXPERTS = [an_expert(name) for name in "abcde"]
GPU = "cuda:0/0"


def some_gpus(gpu_bytes: int = 20, ram_bytes: int = 30, gpus: int = 1) -> Parts:
    pools = [a_pool(f"cuda:0/{n}", gpu_bytes) for n in range(gpus)]
    return some_parts(EXPERTS, [*pools, PoolFacts(RAM, "ram", ram_bytes, 1)], "samba-parallel")


def test_a_miss_is_read_into_host_memory_and_then_copied():
    parts = some_gpus()
    parts.add("a")
    assert (parts.wants("ram"), parts.wants(GPU)) == (["a"], [])
    parts.hold("ram", "a")
    assert (parts.wants("ram"), parts.wants(GPU)) == ([], ["a"])


@pytest.mark.parametrize(("pool", "ram_bytes"), [("cuda:0/0", 5), ("cpu", 30)])
def test_an_expert_that_does_not_fit_host_memory_and_one_for_the_cpu_are_read_from_disk(pool: str, ram_bytes: int):
    parts = some_parts(EXPERTS, [a_pool(pool, 20), PoolFacts(RAM, "ram", ram_bytes, 1)], "samba-parallel")
    parts.add("a")
    assert (parts.wants("ram"), parts.wants(pool)) == ([], ["a"])


def test_an_expert_that_leaves_the_gpu_is_kept_in_host_memory_first():
    parts = some_gpus()
    parts.hold(GPU, "a", "b")
    parts.hold("ram", "c")
    parts.add("c")
    assert (parts.wants("ram"), parts.wants(GPU)) == (["a"], [])
    parts.hold("ram", "a")
    assert (parts.wants("ram"), parts.wants(GPU)) == ([], ["c"])


def test_host_memory_that_is_to_become_smaller_keeps_nothing_and_the_load_goes_on():
    parts = some_gpus(gpu_bytes=15)
    parts.hold(GPU, "a")
    parts.hold("ram", "c")
    parts.residency.targets_bytes[RAM] = 0
    parts.add("c")
    assert (parts.wants("ram"), parts.wants(GPU)) == ([], ["c"])


def test_host_memory_gives_up_copies_of_what_a_gpu_has_and_then_the_least_recently_used():
    parts = some_gpus(ram_bytes=50)
    parts.hold("ram", *"abcde")
    parts.hold(GPU, "d")
    assert parts.victims("ram") == list("dabce")


def test_what_an_executor_waits_for_stays_in_host_memory():
    parts = some_gpus(ram_bytes=10, gpus=2)
    parts.add("a", "b")
    parts.hold("ram", "a")
    assert parts.wants("ram") == ["b"]
    assert parts.victims("ram") == []
    parts.hold(GPU, "a")
    assert parts.victims("ram") == ["a"]


def test_requests_leave_a_pool_that_refuses_their_expert_for_one_that_takes_it():
    parts = some_parts(EXPERTS, [a_pool("cuda:0/0", 20), a_pool("cuda:0/1", 20)], "coserve")
    assert parts.add("a", "b") == ["cuda:0/0", "cuda:0/1"]
    parts.residency.refuse(PoolId("cuda:0/0"), ExpertId("a"), 30.0)
    assert (parts.wants("cuda:0/0"), parts.wants("cuda:0/1")) == ([], ["b"])
    assert parts.waiting("cuda:0/1") == ["b", "a"]
    assert parts.add("a") == ["cuda:0/1"]


def test_the_disk_is_shared_by_turns():
    parts = some_gpus(ram_bytes=30, gpus=3)
    parts.add("a", "b", "c")
    want = next(iter(parts.queues.wants(RAM, 0.0)))
    parts.residency.ledgers[RAM].begin_load(want.expert, 10)
    parts.queues.granted(want, RAM)
    assert (want.expert, parts.wants("ram")) == ("a", ["b", "c"])
    parts.residency.ledgers[RAM].finish_load(want.expert)
    parts.hold(GPU, "a")
    parts.queues.take(parts.residency.executors[next(iter(parts.residency.executors))].executor, 0.0)
    parts.add("d")
    assert parts.wants("ram") == ["b", "c"]
