"""Eviction policies as plain values."""

from experts.moe.policy.eviction import LayeredLru, MostPopular


def a_full_policy(layers: int = 2, slots: int = 4) -> LayeredLru:
    policy = LayeredLru(layers)
    policy.resize(slots)
    for layer in range(layers):
        for expert in range(slots // layers):
            policy.loaded((layer, expert))
    return policy


def test_a_full_layer_evicts_its_own_experts_first():
    policy = a_full_policy()
    policy.used((1, 0))
    assert list(policy.victims((1, 5), 0, urgent=False)) == [(1, 1), (1, 0)]
    assert list(policy.victims((1, 5), 0, urgent=True)) == [(1, 1), (1, 0), (0, 0), (0, 1)]


def test_a_layer_below_its_share_takes_an_empty_slot_or_from_a_layer_above_its_share():
    policy = a_full_policy()
    policy.dropped((1, 0))
    assert list(policy.victims((1, 5), 1, urgent=False)) == []
    policy.loaded((0, 7))
    assert list(policy.victims((1, 5), 0, urgent=False)) == [(0, 0), (0, 1), (0, 7)]


def test_an_expert_that_was_predicted_again_is_evicted_last():
    policy = a_full_policy()
    policy.predicted((1, 0))
    assert next(iter(policy.victims((1, 5), 0, urgent=False))) == (1, 1)


def test_the_popular_stay_and_the_others_pass_through_the_remaining_slots():
    policy = MostPopular([[3, 1, 0, 2], [0, 1, 2, 3]], transit=1)
    policy.resize(5)
    assert policy.popular == ((0, 1), (0, 3), (1, 0), (1, 1))
    for key in policy.popular:
        policy.loaded(key)
    assert list(policy.victims((0, 2), 1, urgent=True)) == []
    policy.loaded((0, 2))
    assert list(policy.victims((1, 3), 0, urgent=False)) == [(0, 2)]
