"""Which generations begin: eMoE's Algorithm 1 by slack."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.moe.policy.schedule import BatchLimits, Generation, SloSlack, StepCosts, TaskProfiles

#: A prefill of n tokens takes 1 + n/100 s, a step of n rows 1 + n/10 s.
COSTS = StepCosts(prefill_token_s=0.01, step_s=1.0, row_s=0.1)
PROFILES = {"short": 4.0, "long": 20.0}


def a_request(name="a", task="short", tokens=100, arrived_s=0.0, slo_s=None, generated=0, most=40, began_s=None):
    return Generation(name, task, tokens, most, arrived_s, slo_s, generated, began_s)


def by_slack(rows=4, tokens=10_000, **options):
    return SloSlack(BatchLimits(rows, tokens), COSTS, TaskProfiles(PROFILES), **options)


def names(admitted):
    return [row.request for row in admitted]


def test_room_is_what_requests_may_come_to_hold_each_row_as_long_as_the_longest():
    limits = BatchLimits(rows=2, tokens=200)
    assert limits.fits([a_request(tokens=60)], a_request(tokens=60))
    assert not limits.fits([a_request(tokens=60)], a_request(tokens=61))
    assert not limits.fits([a_request(tokens=61)], a_request(tokens=1))
    assert not limits.fits([a_request(tokens=1), a_request(tokens=1)], a_request(tokens=1))


def test_the_least_slack_goes_first_whoever_came_first():
    waiting = [a_request("early", "long", slo_s=900.0), a_request("urgent", arrived_s=5.0, slo_s=12.0)]
    assert names(by_slack().admit(waiting, [], 5.0)) == ["urgent", "early"]


@pytest.mark.parametrize(("slo_s", "takes_s"), [(None, 5), (30.0, 5), (300.0, 100)])
def test_a_long_one_gets_its_turn_although_short_ones_come_for_ever(slo_s, takes_s):
    """Its tokens fit alone only; short ones take five steps or longer than patience, and there are always some more."""
    scheduler = by_slack(tokens=400, patience_s=60.0)
    large = a_request("large", tokens=300, slo_s=slo_s)
    waiting = [large]
    until = {a_request(f"first-{end}", tokens=10, began_s=0.0): end * takes_s // 5 for end in (2, 3, 4, 5)}
    now = 0
    while large in waiting:
        now += 1
        until = {row: end for row, end in until.items() if now < end}
        waiting += [a_request(f"{now}-{number}", tokens=10, arrived_s=float(now), slo_s=slo_s) for number in range(2)]
        admitted = scheduler.admit(waiting, list(until), float(now))
        waiting = [row for row in waiting if row not in admitted]
        until |= {replace(row, began_s=float(now)): now + takes_s for row in admitted}
        assert now < 100 + 2 * takes_s
    assert now > 60


def test_nobody_begins_who_would_cost_a_running_request_its_slo():
    # Alone: 2 steps of 1.1 s. With the other's prefill of 5 s it would be late.
    running = [a_request("running", generated=2, slo_s=4.0)]
    waiting = [a_request("other", tokens=400, slo_s=100.0)]
    assert by_slack().admit(waiting, running, 0.0) == ()
    assert names(by_slack().admit(waiting, [], 0.0)) == ["other"]


def test_loading_experts_of_a_task_that_is_not_running_counts():
    profiles = TaskProfiles(PROFILES, {"long": 50.0})
    scheduler = SloSlack(BatchLimits(4, 10_000), COSTS, profiles)
    running = [a_request("running", generated=2, slo_s=30.0)]
    waiting = [a_request("other", "long", tokens=1, slo_s=500.0)]
    assert scheduler.admit(waiting, running, 0.0) == ()
    beside = [*running, a_request("same", "long", generated=1)]
    assert names(scheduler.admit(waiting, beside, 0.0)) == ["other"]


def test_those_whose_slo_is_lost_wait_behind_those_who_can_make_theirs():
    waiting = [a_request("lost", slo_s=1.0), a_request("hopeful", slo_s=30.0)]
    assert names(by_slack(rows=1).admit(waiting, [], 5.0)) == ["hopeful"]


def test_who_waited_beyond_patience_goes_first_within_a_quarter_of_the_rows():
    old = [a_request(f"old{number}", slo_s=1.0, arrived_s=float(number)) for number in range(3)]
    waiting = [*old, *(a_request(f"new{number}", arrived_s=100.0, slo_s=300.0) for number in range(6))]
    admitted = names(by_slack(rows=8, patience_s=60.0).admit(waiting, [], 100.0))
    assert admitted[:2] == ["old0", "old1"]
    assert "old2" not in admitted[:8]
    running = [a_request(f"run{number}", slo_s=1.0, generated=1, began_s=70.0) for number in range(2)]
    assert names(by_slack(rows=8, patience_s=60.0).admit(waiting, running, 100.0))[0] == "new0"


requests = st.builds(
    a_request,
    name=st.integers(0, 10**6).map(str),
    task=st.sampled_from(["short", "long", None]),
    tokens=st.integers(1, 300),
    arrived_s=st.floats(0, 100),
    slo_s=st.none() | st.floats(0.1, 200),
)


@given(
    waiting=st.lists(requests, max_size=30, unique_by=lambda row: row.request),
    running=st.lists(
        requests.map(lambda row: Generation("r" + row.request, row.task, 20, 40, 0.0, row.slo_s, 1)), max_size=4
    ),
)
def test_limits_hold_and_an_idle_engine_always_gets_somebody(waiting, running):
    limits = BatchLimits(rows=4, tokens=600)
    scheduler = SloSlack(limits, COSTS, TaskProfiles(PROFILES))
    admitted = scheduler.admit(waiting, running, 100.0)
    assert len(set(names(admitted))) == len(admitted)
    assert all(row in waiting for row in admitted)
    assert len(running) + len(admitted) <= 4
    if admitted:
        assert max(row.held_tokens for row in [*running, *admitted]) * (len(running) + len(admitted)) <= 600
    if waiting and not running:
        assert admitted
    assert scheduler.admit(waiting, running, 100.0) == admitted
