"""Requests bound to executors: arranging and splitting (CoServe §4.2), and the baselines without either."""

from daemon.policy.request import PoolFacts, PoolId
from experts.spec import ExpertId
from tests.daemon.policy.books import check_queues
from tests.daemon.policy.line import Clockwork, a_pool, a_request, a_scheduler, an_expert, executors_on
from tests.daemon.policy.queue_parts import a_row, some_parts

EXPERTS = [an_expert("a", usage=0.4, then=[("d", 0.9)]), an_expert("b", usage=0.3), an_expert("c"), an_expert("d")]
ONE = [a_pool("cpu", 1000, 3)]
TWO = executors_on("cpu", "cpu")


def a_line(policy: str = "coserve", budget_bytes: int = 40, executors=TWO, **fields) -> Clockwork:
    scheduler = a_scheduler(EXPERTS, [a_pool(budget_bytes=budget_bytes)], executors, policy)
    return Clockwork(scheduler, executors, **fields)


def test_a_request_stands_behind_its_group_and_a_group_runs_in_batches():
    """Figure 9."""
    parts = some_parts(EXPERTS, ONE)
    parts.add(*"abacbaa")
    assert parts.waiting("cpu") == list("aaaabbc")
    parts.hold("cpu", "a", "b", "c")
    assert [parts.run("cpu") for _ in range(4)] == [[1, 3, 6], [7], [2, 5], [4]]


def test_without_arranging_only_neighbours_share_a_batch():
    parts = some_parts(EXPERTS, ONE, "coserve-em")
    parts.add(*"aabaaaac")
    assert parts.waiting("cpu") == list("aabaaaac")
    parts.hold("cpu", "a", "b", "c")
    assert [parts.run("cpu") for _ in range(5)] == [[1, 2], [3], [4, 5, 6], [7], [8]]


def test_a_batch_keeps_to_the_profile_and_to_the_memory_for_intermediate_results():
    pool = PoolFacts(PoolId("cpu"), "cpu", 1000, 8, activation_bytes=50)
    parts = some_parts(EXPERTS, [pool], matrix=[a_row("cpu", max_batch=6, activation_bytes=10)])
    parts.hold("cpu", "a")
    parts.add(*"a" * 9)
    assert [len(parts.run("cpu")) for _ in range(2)] == [5, 4]


def test_a_request_that_leaves_the_queue_is_in_no_batch_and_may_come_back():
    parts = some_parts(EXPERTS, ONE)
    parts.hold("cpu", "a")
    parts.add(*"aaaaa")
    for number in (1, 3, 4):
        parts.queues.discard(a_request(number))
        check_queues(parts.queues)
    parts.queues.add(a_request(3))
    check_queues(parts.queues)
    assert [request.request_id for request in parts.queues.requests_of(ExpertId("a"))] == [2, 5, 3]
    assert parts.take("cpu") == [2, 5, 3]


def test_nothing_is_loaded_ahead_and_nothing_while_the_executor_runs():
    line = a_line("coserve-em-ra", executors=executors_on("cpu"), budget_bytes=40)
    line.scheduler._fill.clear()
    line.arrive(a_request(1, "a"), a_request(2, "b"), a_request(3, "a", 0.5))
    line.run()
    assert [load.expert for load in line.loads()] == ["a", "b"]
    assert line.started_s == {1: 1.0, 3: 1.0, 2: 1.0 + 0.3 + 1.0}


def test_executors_fill_in_turn_by_usage_before_the_first_image():
    line = a_line("coserve-none", budget_bytes=20)
    line.turn()
    line.run()
    assert [(load.pool, load.expert, load.cause) for load in line.loads()] == [
        ("cpu/0", "a", "startup"),
        ("cpu/1", "b", "startup"),
    ]


def test_a_baseline_runs_requests_one_by_one_and_a_chains_next_step_at_once():
    line = a_line("samba", budget_bytes=20, then=lambda request: "d" if request.expert == "a" else None)
    line.arrive(a_request(1, "a"), a_request(2, "b"), a_request(3, "a"), a_request(4, "b"))
    line.run()
    assert [request.expert for request in line.ran] == ["a", "d", "b", "a", "d", "b"]
    assert {len(run.batch) for run in line.runs()} == {1}
    assert {run.executor for run in line.runs()} == {"cpu/0"}
