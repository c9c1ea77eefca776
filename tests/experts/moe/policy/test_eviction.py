"""Who is evicted: residency policies as plain values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.moe.policy.eviction import LayeredLru, MostPopular, divide


@given(slots=st.integers(0, 60), shares=st.lists(st.floats(0, 10), min_size=1, max_size=8))
def test_all_slots_are_divided_and_each_layer_gets_one_where_they_suffice(slots: int, shares: list[float]):
    parts = divide(slots, shares)
    assert sum(parts) == slots
    assert len(parts) == len(shares)
    assert slots < len(shares) or min(parts) >= 1


@pytest.mark.parametrize(
    ("slots", "shares", "parts"),
    [(12, [1, 1, 1], (4, 4, 4)), (11, [1, 1, 1], (4, 4, 3)), (12, [6, 2, 4], (6, 2, 4)), (2, [1, 1, 1], (1, 1, 0))],
)
def test_shares_are_kept_where_they_are_whole(slots: int, shares: list[float], parts: tuple[int, ...]):
    assert divide(slots, shares) == parts


def a_full_policy(layers: int = 2, slots: int = 4) -> LayeredLru:
    policy = LayeredLru(layers)
    policy.resize(slots)
    for layer in range(layers):
        for expert in range(slots // layers):
            policy.loaded((layer, expert))
    return policy


def test_a_full_layer_gives_its_own_first():
    policy = a_full_policy()
    policy.used((1, 0))
    assert list(policy.victims((1, 5), 0, urgent=False)) == [(1, 1), (1, 0)]
    assert list(policy.victims((1, 5), 0, urgent=True)) == [(1, 1), (1, 0), (0, 0), (0, 1)]


def test_a_layer_below_its_share_takes_an_empty_slot_or_from_one_above():
    policy = a_full_policy()
    policy.dropped((1, 0))
    assert list(policy.victims((1, 5), 1, urgent=False)) == []
    policy.loaded((0, 7))
    assert list(policy.victims((1, 5), 0, urgent=False)) == [(0, 0), (0, 1), (0, 7)]


def test_what_was_predicted_again_goes_last():
    policy = a_full_policy()
    policy.predicted((1, 0))
    assert next(iter(policy.victims((1, 5), 0, urgent=False))) == (1, 1)


def test_other_shares_hold_from_the_next_eviction_on():
    policy = a_full_policy()
    policy.share([1, 3])
    assert policy.quotas == (1, 3)
    assert list(policy.victims((1, 5), 0, urgent=False)) == [(0, 0), (0, 1)]


def test_the_popular_stay_and_the_others_pass_through_what_is_left():
    policy = MostPopular([[3, 1, 0, 2], [0, 1, 2, 3]], transit=1)
    policy.resize(5)
    assert policy.kept == ((0, 1), (0, 3), (1, 0), (1, 1))
    for key in policy.kept:
        policy.loaded(key)
    assert list(policy.victims((0, 2), 1, urgent=True)) == []
    policy.loaded((0, 2))
    assert list(policy.victims((1, 3), 0, urgent=False)) == [(0, 2)]


def test_an_empty_slot_is_kept_for_the_popular_while_some_of_them_are_missing():
    policy = MostPopular([[0, 1, 2, 3]], transit=1)
    policy.resize(3)
    policy.loaded((0, 3))
    assert list(policy.victims((0, 2), 2, urgent=False)) == [(0, 3)]
    assert list(policy.victims((0, 0), 2, urgent=False)) == []


def test_with_fewer_slots_the_least_popular_leave_first():
    policy = MostPopular([[0, 1, 2, 3]], transit=0)
    policy.resize(3)
    for key in policy.kept:
        policy.loaded(key)
    policy.resize(2)
    assert next(iter(policy.victims(None, 0, urgent=True))) == (0, 2)


def test_where_all_experts_fit_all_of_them_stay():
    policy = MostPopular([[0, 1], [1, 0]], transit=1)
    policy.resize(4)
    assert len(policy.kept) == 4
