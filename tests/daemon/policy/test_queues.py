"""Requests bound to executors: arranging and splitting (CoServe §4.2), and what operators and failures do to them."""

from daemon.policy.actions import Load
from daemon.policy.request import PoolFacts, PoolId
from experts.spec import ExpertId
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
        parts.queues.check()
    parts.queues.add(a_request(3))
    parts.queues.check()
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


def test_what_failed_to_load_goes_to_an_executor_that_has_it():
    line = a_line("coserve-none", budget_bytes=80)
    scheduler = line.scheduler
    scheduler._fill.clear()
    scheduler.arrive(a_request(1, "a"), 0.0)
    load = scheduler.next_load(PoolId("cpu/0"), 0.0)
    assert isinstance(load, Load)
    scheduler.load_done(load, 1.0)
    scheduler.arrive(a_request(2, "a"), 0.0)
    load = scheduler.next_load(PoolId("cpu/1"), 0.0)
    assert isinstance(load, Load)
    assert scheduler.load_failed(load, "torn cable", 1.0) == ()
    line.turn()
    line.run()
    assert [(run.executor, len(run.batch)) for run in line.runs()] == [("cpu/0", 2)]


def test_a_pin_that_takes_an_executors_memory_sends_its_requests_to_others():
    line = a_line("coserve", budget_bytes=20)
    line.turn()
    line.run()
    line.arrive(*(a_request(n, "abcd"[n % 4], 100.0) for n in range(12)))
    line.run(until_s=100.0)
    line.scheduler.pin(ExpertId("c"), PoolId("cpu/1"))
    line.turn()
    line.run()
    assert len(line.ran) == 12
    after = [run for run in line.runs() if run.executor == "cpu/1"][1:]
    assert {run.expert for run in after} <= {"c"}


def test_grouping_and_prediction_save_loads():
    """The paper's figure 16, in small: each idea reduces the number of switches."""
    loads: list[int] = []
    for policy in ("coserve-none", "coserve-em-ra", "coserve"):
        executors = executors_on("cpu", "cpu")
        line = Clockwork(a_scheduler(EXPERTS, [a_pool(budget_bytes=40)], executors, policy), executors)
        line.arrive(*(a_request(n, "abacabdbca"[n % 10], 0.01 * n) for n in range(200)))
        line.run()
        loads.append(len(line.loads("demand")))
    assert loads == sorted(loads, reverse=True)
    assert loads[0] > 4 * loads[2]
