"""Which experts run themselves and whose tokens are united (BrownoutServe §IV.C, figures 4 and 5)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.moe.policy.brownout import busiest, in_order, split

#: Figure 5a: 20 tokens at 8 experts.
FIGURE = (2, 4, 1, 5, 2, 1, 2, 3)
COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=24)
THRESHOLDS = st.one_of(st.sampled_from([tenth / 10 for tenth in range(11)]), st.floats(0.0, 1.0))


def test_the_worked_example_sends_12_of_20_tokens_to_three_experts():
    assert busiest(FIGURE, 0.6) == (3, 1, 7)
    full = split(FIGURE, 0.6, None)
    assert full.originals == (1, 3, 7)
    assert full.dropped == (0, 2, 4, 5, 6)
    assert full.accesses / len(FIGURE) == 0.375


def test_the_worked_example_unites_four_neighbours():
    partial = split(FIGURE, 0.6, in_order(8, 4))
    assert partial.originals == (1, 3, 7)
    assert partial.united == ((0, (0, 2)), (1, (4, 5, 6)))
    assert partial.accesses == 5


def test_an_expert_alone_in_its_group_runs_itself():
    """Figure 5b: groups of three, and of E6, E7 only E6 is left."""
    counts = (5, 1, 2, 4, 1, 1, 2, 3)
    partial = split(counts, 0.6, in_order(8, 3))
    assert partial.originals == (0, 3, 6, 7)
    assert partial.united == ((0, (1, 2)), (1, (4, 5)))


def test_ties_go_to_the_lower_index():
    assert busiest((2, 2, 2, 2), 0.5) == (0, 1)


def test_a_product_that_is_a_little_too_large_asks_for_no_expert_more():
    assert 100 * 0.55 > 55
    assert busiest((55, 45), 0.55) == (0,)


def test_without_tokens_nothing_runs():
    assert split((0, 0, 0, 0), 0.5, in_order(4, 2)).accesses == 0


@given(COUNTS)
def test_at_threshold_1_every_expert_with_tokens_runs_itself(counts: list[int]):
    asked = tuple(expert for expert, count in enumerate(counts) if count)
    for groups in (None, in_order(len(counts), 4)):
        assert split(counts, 1.0, groups).originals == asked
        assert split(counts, 1.0, groups).accesses == len(asked)


@given(COUNTS, THRESHOLDS)
def test_the_busiest_hold_the_threshold_and_not_one_could_be_left_out(counts: list[int], threshold: float):
    chosen = busiest(counts, threshold)
    held = sum(counts[expert] for expert in chosen)
    wanted = sum(counts) * threshold
    assert held >= wanted - 1e-6
    assert not chosen or held - counts[chosen[-1]] < wanted + 1e-6
    left = [count for expert, count in enumerate(counts) if expert not in chosen]
    assert not chosen or counts[chosen[-1]] >= max(left, default=0)


@given(COUNTS, THRESHOLDS, st.sampled_from([2, 4, 8]))
def test_every_expert_with_tokens_is_somewhere_exactly_once(counts: list[int], threshold: float, way: int):
    groups = in_order(len(counts), way)
    partial, full = split(counts, threshold, groups), split(counts, threshold, None)
    asked = [expert for expert, count in enumerate(counts) if count]
    assert sorted([*partial.originals, *(one for _, members in partial.united for one in members)]) == asked
    assert sorted([*full.originals, *full.dropped]) == asked
    assert all(len(members) > 1 and {groups[one] for one in members} == {group} for group, members in partial.united)
    assert full.accesses <= partial.accesses <= len(asked)


@pytest.mark.parametrize(("way", "groups"), [(2, (0, 0, 1, 1, 2)), (4, (0, 0, 0, 0, 1)), (8, (0, 0, 0, 0, 0))])
def test_neighbours_by_index_are_united_and_the_last_group_may_be_small(way: int, groups: tuple[int, ...]):
    assert in_order(5, way) == groups
