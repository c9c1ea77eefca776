"""Which experts the next prompts want (eMoE Eq. 2), and which of those that are there go for them."""

import pytest

from experts.moe.policy.expected import ChosenExperts, choose, expected_tokens, to_load
from experts.moe.policy.schedule import Generation, TaskProfiles

FREQUENCIES = {"a": [[0.7, 0.2, 0.1, 0.0]] * 2, "b": [[0.0, 0.1, 0.2, 0.7]] * 2}


def a_request(task, tokens=10, generated=0):
    return Generation("r", task, tokens, 100, 0.0, None, generated)


def test_expected_tokens_are_prompt_and_output_by_sensitivity_and_frequency():
    profiles = TaskProfiles({"a": 30.0, "b": 10.0})
    weights = {"a": (1.0, 0.5)}
    tokens = expected_tokens(
        [(a_request("a"), 2.0), (a_request("b", generated=4), 1.0)], FREQUENCIES, weights, profiles
    )
    # a: 2 × (10 + 30) tokens, half of them in layer 1; b: 10 + 4 + 6 tokens in both.
    assert tokens[0] == pytest.approx([56.0, 16.0 + 2.0, 8.0 + 4.0, 14.0])
    assert tokens[1] == pytest.approx([28.0, 8.0 + 2.0, 4.0 + 4.0, 14.0])


def test_experts_with_the_most_tokens_are_chosen_over_all_layers_with_enough_in_each():
    tokens = [[9.0, 8.0, 7.0, 6.0], [1.0, 2.0, 0.5, 0.1]]
    assert choose(tokens, 5, 1, ((), ())) == ((0, 1, 2, 3), (1,))
    assert choose(tokens, 5, 2, ((), ())) == ((0, 1, 2), (0, 1))


def test_what_is_resident_stays_unless_another_is_worth_the_load():
    tokens = [[10.0, 9.0, 1.0]]
    assert choose(tokens, 1, 1, ((1,),)) == ((1,),)
    assert choose(tokens, 1, 1, ((2,),)) == ((0,),)
    assert choose(tokens, 1, 1, ((1,),), bonus=0.0) == ((0,),)


def test_only_what_is_missing_is_loaded():
    assert to_load(((0, 2), (1,)), ((2, 3), (1,))) == ((0, 0),)


def test_who_is_not_chosen_makes_room_first_in_the_layer_that_needs_it():
    residency = ChosenExperts()
    residency.choose(((0, 1), (2,)))
    for key in [(0, 0), (0, 3), (1, 2), (1, 4)]:
        residency.loaded(key)
    assert list(residency.victims((1, 2), 0, urgent=False)) == [(1, 4), (0, 3)]
    assert list(residency.victims((1, 2), 1, urgent=False)) == []
    assert list(residency.victims(None, 0, urgent=True)) == [(0, 3), (1, 4), (0, 0), (1, 2)]
    residency.dropped((1, 4))
    assert list(residency.victims((1, 2), 0, urgent=False)) == [(0, 3)]
