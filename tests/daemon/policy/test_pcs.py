"""`coserve-plus` on several PCs: an expert stays with the PC that has read it, and only changed pools are asked."""

import pytest

from daemon.policy.actions import Load, Wait
from daemon.policy.request import PoolFacts, PoolId
from daemon.policy.scheduler import Scheduler
from experts.spec import ExpertId
from tests.daemon.policy.line import CPU, a_pool, a_request, a_scheduler, an_expert, executors_on

PC2 = PoolId("pc2-cpu")
EXECUTORS = executors_on("cpu", "pc2-cpu")


def a_line(budget_bytes: int = 10) -> Scheduler:
    """Return a line of two PCs whose pools hold one expert each. Nothing is loaded before its first image."""
    pools = [a_pool("cpu", budget_bytes), PoolFacts(PC2, "cpu", budget_bytes, 4, host="pc2")]
    return a_scheduler([an_expert("a", usage=0.0), an_expert("b", usage=0.0)], pools, EXECUTORS)


def served(scheduler: Scheduler, pool: PoolId, number: int, expert: str, now: float) -> None:
    """Let `pool` load `expert` for a request, and its executor answer it."""
    scheduler.arrive(a_request(number, expert, now), now)
    load = scheduler.next_load(pool, now)
    assert isinstance(load, Load)
    assert load.expert == expert
    scheduler.load_done(load, 0.1)
    executor = next(facts.executor for facts in EXECUTORS if facts.pool == pool)
    assert not isinstance(scheduler.next_action(executor, now), Wait)
    scheduler.batch_done(executor, 0.1)


def a_line_where_pc2_has_read_a() -> Scheduler:
    scheduler = a_line()
    served(scheduler, PC2, 1, "a", 0.0)
    served(scheduler, PC2, 2, "b", 1.0)
    scheduler.arrive(a_request(3, "a", 2.0), 2.0)
    return scheduler


def test_an_evicted_expert_is_left_to_the_pc_that_has_read_it() -> None:
    scheduler = a_line_where_pc2_has_read_a()
    assert isinstance(scheduler.next_load(CPU, 2.0), Wait)
    assert scheduler.next_load(PC2, 2.0) == Load(PC2, ExpertId("a"), (ExpertId("b"),), "demand")


def test_an_idle_pc_reads_what_the_pc_that_has_read_it_has_no_room_for() -> None:
    scheduler = a_line()
    for number, expert in enumerate("ab"):
        served(scheduler, CPU, number, expert, 0.0)
    for number, expert in enumerate("ba", 10):
        scheduler.arrive(a_request(number, expert, 1.0), 1.0)
    assert isinstance(scheduler.next_load(CPU, 1.0), Wait)  # its resident, b, is wanted
    assert scheduler.next_load(PC2, 1.0) == Load(PC2, ExpertId("a"), (), "demand")


def test_a_group_that_is_due_may_be_read_by_any_pc() -> None:
    scheduler = a_line_where_pc2_has_read_a()
    assert isinstance(scheduler.next_load(CPU, 21.9), Wait)
    assert scheduler.next_load(CPU, 22.0) == Load(CPU, ExpertId("a"), (), "demand")


@pytest.mark.parametrize("trouble", ["lost", "failed", "hung"])
def test_a_pc_that_cannot_read_an_expert_any_more_leaves_it_to_others(trouble: str) -> None:
    scheduler = a_line_where_pc2_has_read_a()
    match trouble:
        case "lost":
            scheduler.pool_lost(PC2)
        case _:
            load = scheduler.next_load(PC2, 2.0)
            assert isinstance(load, Load)
            if trouble == "failed":
                assert scheduler.load_failed(load, "CUDA error", 2.0, is_device_error=True) == ()
            else:
                scheduler.load_hung(load)
    load = scheduler.next_load(CPU, 2.5)
    assert isinstance(load, Load)
    assert load.expert == "a"
