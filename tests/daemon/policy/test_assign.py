"""The executor of a request: round robin, or the least makespan of CoServe §4.2 against a naive reading of it."""

import pytest

from daemon.policy.paper.assign import NS_PER_S, partition
from daemon.policy.presets import PRESETS
from daemon.policy.request import RAM, ExecutorId, PoolFacts
from tests.daemon.policy.line import a_pool, an_expert, executors_on
from tests.daemon.policy.queue_parts import B_S, DISK_S, K_S, RAM_S, a_row, some_parts

EXPERTS = [an_expert(name) for name in "abcdef"]


def test_each_executor_gets_an_equal_share_of_its_device_and_the_gpus_come_first():
    pools = [a_pool("cpu", 100), a_pool("cuda:0", 91), PoolFacts(RAM, "ram", 50, 1)]
    shares, used = partition(pools, executors_on("cpu", "cuda:0", "cuda:0"), PRESETS["coserve"])
    assert {share.pool: share.budget_bytes for share in shares} == {
        "cpu": 100,
        "cuda:0/1": 45,
        "cuda:0/2": 45,
        "ram": 50,
    }
    assert [(each.executor, each.pool) for each in used] == [
        ("cuda:0/1", "cuda:0/1"),
        ("cuda:0/2", "cuda:0/2"),
        ("cpu/0", "cpu"),
    ]
    assert {share.device for share in shares} == {"cpu", "cuda:0", "ram"}


def test_round_robin_passes_over_an_executor_that_can_never_have_the_expert():
    pools = [a_pool("cuda:0/0", 100), a_pool("cuda:0/1", 5), a_pool("cuda:0/2", 100)]
    parts = some_parts(EXPERTS, pools, "coserve-none")
    assert parts.add("a", "b", "c", "d") == ["cuda:0/0", "cuda:0/2", "cuda:0/0", "cuda:0/2"]


def test_a_request_goes_where_the_makespan_stays_least_and_among_equals_where_it_adds_least():
    """Figure 8: a queue that is longer already may take it for less."""
    parts = some_parts(EXPERTS)
    parts.hold("cuda:0/1", "b", "c")
    assert parts.add("a") == ["cuda:0/0"]
    assert parts.add("b") == ["cuda:0/1"]
    assert parts.add("c") == ["cuda:0/1"], "adding to the shorter third queue would have cost a load"


def test_a_load_costs_nothing_where_the_expert_is_resident_or_queued_and_less_from_host_memory():
    pools = [a_pool("cuda:0/0", 100), PoolFacts(RAM, "ram", 100, 1)]
    parts = some_parts(EXPERTS, pools)
    queue = parts.queues._queues[ExecutorId("cuda:0/0")]
    parts.hold("cuda:0/0", "b")
    parts.hold("ram", "c")
    grown: list[float] = []
    for expert in "aabc":
        before = queue.work_ns
        parts.add(expert)
        grown.append((queue.work_ns - before) / NS_PER_S)
    assert grown == pytest.approx([K_S + B_S + DISK_S, K_S, K_S + B_S, K_S + B_S + RAM_S])


def test_an_expert_goes_only_to_executors_whose_memory_can_hold_it():
    pools = [a_pool("cuda:0/0", 10), a_pool("cpu", 50)]
    big = an_expert("big", 40)
    parts = some_parts([*EXPERTS, big], pools, matrix=[a_row("cuda:0"), a_row("cpu", k_s=5.0)])
    assert parts.add("big", "big", "a") == ["cpu", "cpu", "cuda:0/0"]


def test_requests_move_when_their_executor_can_no_longer_have_their_expert():
    parts = some_parts(EXPERTS, [a_pool("cuda:0/0", 30), a_pool("cuda:0/1", 30)])
    assert parts.add("a", "b") == ["cuda:0/0", "cuda:0/1"]
    parts.residency.targets_bytes[parts.residency.executors[ExecutorId("cuda:0/0")].pool] = 5
    parts.residency.room_changed()
    assert parts.take("cuda:0/0") == []
    assert parts.waiting("cuda:0/0") == []
    assert sorted(parts.waiting("cuda:0/1")) == ["a", "b"]
    assert parts.add("c") == ["cuda:0/1"]
