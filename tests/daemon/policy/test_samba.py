"""The baselines (docs/architecture.md): first come, first served, batches of one, a chain's next step at once."""

from tests.daemon.policy.line import Clockwork, a_pool, a_request, a_scheduler, an_expert, executors_on

EXPERTS = [an_expert("a", then=[("d", 0.9)]), an_expert("b"), an_expert("c"), an_expert("d")]


def a_samba(budget_bytes: int = 20, policy: str = "samba", **fields) -> Clockwork:
    executors = executors_on("cpu", "cpu")
    scheduler = a_scheduler(EXPERTS, [a_pool(budget_bytes=budget_bytes)], executors, policy)
    return Clockwork(scheduler, executors, **fields)


def test_requests_run_in_the_order_of_their_arrival_one_by_one():
    line = a_samba()
    line.arrive(*(a_request(n, "abcba"[n]) for n in range(5)))
    line.run()
    assert [request.request_id for request in line.ran] == [0, 1, 2, 3, 4]
    assert {len(run.batch) for run in line.runs()} == {1}
    assert {run.executor for run in line.runs()} == {"cpu/0"}


def test_a_detector_runs_right_after_its_classifier():
    line = a_samba(then=lambda request: "d" if request.expert == "a" else None)
    line.arrive(a_request(1, "a"), a_request(2, "b"), a_request(3, "a"))
    line.run()
    assert [request.expert for request in line.ran] == ["a", "d", "b", "a", "d"]


def test_nothing_is_loaded_before_the_head_of_the_queue_needs_it():
    line = a_samba(budget_bytes=40)
    line.turn()
    assert line.loads() == []
    line.arrive(a_request(1, "a"), a_request(2, "b"))
    line.run()
    assert [(load.expert, load.cause) for load in line.loads()] == [("a", "demand"), ("b", "demand")]
    assert line.started_s == {1: 1.0, 2: 2.2}


def test_in_parallel_requests_go_round_the_executors_and_each_has_half_of_the_memory():
    line = a_samba(budget_bytes=40, policy="samba-parallel")
    line.arrive(*(a_request(n, "abcb"[n]) for n in range(4)))
    line.run()
    assert [(run.executor, run.expert) for run in line.runs()] == [
        ("cpu/0", "a"),
        ("cpu/1", "b"),
        ("cpu/1", "b"),
        ("cpu/0", "c"),
    ]
    assert [(pool.pool, pool.budget_bytes) for pool in line.scheduler.snapshot().pools] == [
        ("cpu/0", 20),
        ("cpu/1", 20),
    ]
