"""Eviction policies as plain values."""

import random
from collections import Counter

import pytest

from experts.moe.policy.eviction import KeepChosen, LayeredLru, allot


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


def test_the_chosen_stay_and_the_others_pass_through_the_remaining_slots():
    policy = KeepChosen()
    policy.chosen = frozenset({(0, 1), (0, 3), (1, 0), (1, 1)})
    for key in sorted(policy.chosen):
        policy.loaded(key)
    assert list(policy.victims((0, 2), 1, urgent=True)) == []
    policy.loaded((0, 2))
    assert list(policy.victims((1, 3), 0, urgent=False)) == [(0, 2)]


def test_with_a_slot_more_than_chosen_experts_no_layer_ever_has_fewer_than_its_number():
    counts, rng = (2, 4, 3), random.Random(0)
    policy = KeepChosen()
    resident = {(layer, expert) for layer, count in enumerate(counts) for expert in range(count)}
    chosen = {layer: list(range(count)) for layer, count in enumerate(counts)}
    for key in resident:
        policy.loaded(key)
    for _ in range(300):
        layer = rng.randrange(3)
        chosen[layer] = rng.sample(range(8), counts[layer])
        policy.chosen = frozenset((number, expert) for number, row in chosen.items() for expert in row)
        for key in [(layer, expert) for expert in chosen[layer] if (layer, expert) not in resident]:
            free = sum(counts) + 1 - len(resident)
            victim = next(policy.victims(key, free, urgent=False), None)
            assert free or victim is not None
            if victim is not None:
                resident.remove(victim)
                policy.dropped(victim)
            present = Counter(number for number, _ in resident)
            assert all(present[number] >= count for number, count in enumerate(counts))
            resident.add(key)
            policy.loaded(key)


@pytest.mark.parametrize(("slots", "expected"), [(12, (6, 2, 4)), (15, (8, 2, 5)), (6, (2, 2, 2)), (99, (8, 8, 8))])
def test_slots_are_allotted_in_proportion_to_a_plan(slots: int, expected: tuple[int, ...]):
    assert allot(slots, (4, 0, 2), 2, 8) == expected
