"""`coserve-plus`: one demand table, late binding, a loader that runs ahead, age within bounds."""

import pytest

from daemon.policy.late.demand import FULL_BATCH_S
from daemon.policy.presets import Tuning
from daemon.policy.request import ExecutorId
from experts.spec import ExpertId
from tests.daemon.policy.line import Clockwork, a_pool, a_request, a_scheduler, an_expert, executors_on

ABCD = [an_expert(name, usage=usage) for name, usage in zip("abcd", (0.4, 0.3, 0.2, 0.1), strict=True)]
ONE = executors_on("cpu")


def a_line(experts=ABCD, budget_bytes=30, pools=None, executors=ONE, tuning=None, **fields) -> Clockwork:
    scheduler = a_scheduler(experts, pools or [a_pool(budget_bytes=budget_bytes)], executors, tuning=tuning)
    return Clockwork(scheduler, executors, **fields)


def filled(line: Clockwork) -> Clockwork:
    line.turn()
    line.run()
    return line


def test_an_expert_with_images_is_loaded_before_the_fill():
    line = a_line(budget_bytes=20)
    line.arrive(a_request(1, "d"))
    line.run()
    assert [(load.expert, load.cause) for load in line.loads()] == [("d", "demand"), ("a", "startup")]


def test_the_fullest_batch_among_the_residents_goes_first_and_ties_go_by_arrival():
    line = filled(a_line(budget_bytes=40))
    line.arrive(*(a_request(n, expert, 100.0) for n, expert in enumerate("abbbccc")))
    line.run()
    assert [run.expert for run in line.runs()] == ["b", "c", "a"]


def test_the_loader_runs_ahead_with_the_oldest_request_first_while_executors_have_work():
    line = filled(a_line(budget_bytes=20))
    line.arrive(*(a_request(n, expert, 100.0) for n, expert in enumerate("acddd")))
    line.run(until_s=100.0)
    assert [load.expert for load in line.loads("demand")] == ["c"]


@pytest.mark.parametrize(("second_s", "first_read"), [(100.2, "b"), (100.5, "d")])
def test_each_image_counts_as_a_fifth_of_a_second_of_waiting_while_executors_have_no_work(second_s, first_read):
    line = filled(a_line(budget_bytes=10))
    line.arrive(a_request(1, "c", 100.0), a_request(2, "d", 100.1), *(a_request(n, "b", second_s) for n in (3, 4)))
    line.run()
    assert [load.expert for load in line.loads("demand")][:2] == ["c", first_read]


def test_what_queued_preliminaries_will_send_is_loaded_after_what_waits():
    experts = [an_expert("a", then=[("d", 0.9)]), an_expert("b", then=[("d", 0.9)]), an_expert("c"), an_expert("d")]
    line = a_line(experts, budget_bytes=30)
    line.arrive(*(a_request(n, "aabb"[n]) for n in range(4)))
    line.run(until_s=0.0)
    assert [(load.expert, load.cause) for load in line.loads()] == [
        ("a", "demand"),
        ("b", "demand"),
        ("d", "prefetch"),
    ]


def test_an_expert_without_demand_goes_by_least_usage():
    line = filled(a_line(budget_bytes=30))
    line.arrive(a_request(1, "d", 100.0))
    line.run()
    assert line.loads("demand")[0].evict == ("c",)


def test_an_expert_with_demand_stays_until_another_group_is_due():
    line = filled(a_line([an_expert("a", usage=0.5), an_expert("b")], budget_bytes=10, tuning=Tuning(max_wait_s=5.0)))
    line.arrive(*(a_request(n, "a", 100.0 + n * 0.1) for n in range(200)), a_request(999, "b", 100.0))
    line.run()
    waited_s = line.started_s[999] - 100.0
    assert 5.0 <= waited_s <= 7.0


def test_a_small_chance_of_demand_evicts_no_expert():
    line = filled(a_line([an_expert("a", usage=0.5, then=[("d", 0.1)]), an_expert("d")], budget_bytes=10))
    line.arrive(a_request(1, "a", 100.0))
    line.run()
    assert [load.expert for load in line.loads()] == ["a"]


def test_under_steady_overload_the_longest_wait_of_a_cold_expert_is_bounded():
    experts = [an_expert("hot", usage=0.9), *(an_expert(f"cold{n}", usage=0.01) for n in range(6))]
    line = a_line(experts, budget_bytes=20, load_s=0.5, tuning=Tuning(max_wait_s=3.0))
    hot = [a_request(n, "hot", n * 0.05) for n in range(2000)]
    cold = [a_request(10_000 + n, f"cold{n % 6}", n * 2.0) for n in range(45)]
    line.arrive(*hot, *cold)
    line.run(until_s=100.0)
    waits = [line.started_s[request.request_id] - request.arrived_s for request in cold if request.arrived_s < 80.0]
    assert max(waits) < 2 * 3.0 + FULL_BATCH_S


def test_a_full_batch_counts_as_much_as_a_bounded_wait():
    """Full batches go first, but a single image does not wait for a whole flood of them."""
    line = filled(a_line(budget_bytes=40, tuning=Tuning(max_wait_s=1.0)))
    line.arrive(*(a_request(n, "bcd"[n % 3], 100.2) for n in range(3)))
    line.arrive(*(a_request(100 + n, "a", 100.0 + n * 0.02) for n in range(4000)))
    line.run(until_s=150.0)
    first = [run.expert for run in line.runs()]
    assert first[:8] == ["a"] * 8
    assert max(line.started_s[n] for n in range(3)) < 100.2 + 2 * 1.0 + FULL_BATCH_S


def test_a_request_near_its_deadline_goes_to_the_front_of_its_group():
    line = filled(a_line(tuning=Tuning(deadline_margin_s=1.0), k_s=0.2))
    line.arrive(*(a_request(n, "a", 100.0) for n in range(12)), a_request(99, "a", 100.0, deadline_s=103.0))
    line.run()
    assert line.started_s[99] < line.started_s[11]
    assert not line.expired


def test_two_pools_never_load_the_same_expert_for_the_same_images():
    pools, executors = [a_pool("cuda:0", 20), a_pool("cuda:1", 20)], executors_on("cuda:0", "cuda:1")
    line = a_line(pools=pools, executors=executors)
    line.arrive(*(a_request(n, "abcd"[n % 4]) for n in range(16)))
    line.run()
    assert sorted(load.expert for load in line.loads()) == ["a", "b", "c", "d"]
    assert {run.executor for run in line.runs()} == {"cuda:0/0", "cuda:1/1"}


def test_beside_a_gpu_the_cpu_reads_too_and_the_gpu_first():
    pools, executors = [a_pool("cuda:0", 10), a_pool("cpu", 10)], executors_on("cuda:0", "cpu")
    line = a_line(pools=pools, executors=executors)
    line.arrive(*(a_request(n, expert) for n, expert in enumerate("aaabbc")))
    line.run(until_s=0.0)
    assert [(load.pool, load.expert) for load in line.loads()] == [("cuda:0", "a"), ("cpu", "b")]


def test_a_batch_that_ran_out_of_memory_bounds_the_next_ones():
    line = filled(a_line())
    line.scheduler.limit_batch(ExecutorId("cpu/0"), ExpertId("a"), 2)
    line.arrive(*(a_request(n, "b", 100.0) for n in range(4)))
    line.run()
    assert [len(run.batch) for run in line.runs()] == [2, 2]
