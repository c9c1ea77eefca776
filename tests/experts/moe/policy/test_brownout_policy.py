"""Which experts run themselves and which are united (BrownoutServe §IV.C), and the latency controller (§IV.E)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.moe.policy.brownout import LatencyController, SalcRule, busiest, groups_in_order, split

#: Figure 5a: 20 tokens at 8 experts.
FIGURE = (2, 4, 1, 5, 2, 1, 2, 3)
COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=24)
THRESHOLDS = st.one_of(st.sampled_from([tenth / 10 for tenth in range(11)]), st.floats(0.0, 1.0))


def test_the_worked_example_sends_12_of_20_tokens_to_three_experts():
    assert busiest(FIGURE, 0.6) == (3, 1, 7)
    full = split(FIGURE, 0.6, None)
    assert (full.originals, full.dropped) == ((1, 3, 7), (0, 2, 4, 5, 6))
    partial = split(FIGURE, 0.6, groups_in_order(8, 4))
    assert (partial.originals, partial.united) == ((1, 3, 7), ((0, (0, 2)), (1, (4, 5, 6))))


@given(COUNTS, THRESHOLDS)
def test_the_busiest_hold_the_threshold_and_none_of_them_could_be_left_out(counts: list[int], threshold: float):
    experts = busiest(counts, threshold)
    total = sum(counts[expert] for expert in experts)
    needed = sum(counts) * threshold
    assert total >= needed - 1e-6
    assert not experts or total - counts[experts[-1]] < needed + 1e-6
    others = [count for expert, count in enumerate(counts) if expert not in experts]
    assert not experts or counts[experts[-1]] >= max(others, default=0)


@given(COUNTS, THRESHOLDS, st.sampled_from([2, 4, 8]))
def test_every_expert_with_tokens_is_somewhere_exactly_once(counts: list[int], threshold: float, way: int):
    groups = groups_in_order(len(counts), way)
    partial, full = split(counts, threshold, groups), split(counts, threshold, None)
    needed = [expert for expert, count in enumerate(counts) if count]
    united = [expert for _, members in partial.united for expert in members]
    assert sorted([*partial.originals, *united]) == needed
    assert sorted([*full.originals, *full.dropped]) == needed
    for group, members in partial.united:
        assert len(members) > 1
        assert {groups[expert] for expert in members} == {group}
    assert len(full.originals) <= len(partial.originals) + len(partial.united)


RULE = SalcRule(slo_s=0.15, window_s=10.0, interval_s=1.0)


def a_controller(threshold: float = 1.0) -> LatencyController:
    controller = LatencyController(RULE)
    assert controller.check(0.0) == 1.0, "it begins without brownout"
    controller.threshold = threshold
    return controller


def test_above_the_slo_the_threshold_shrinks_once_per_interval():
    controller = a_controller()
    controller.observe(0.151, 0.0)
    assert controller.check(0.99) == 1.0
    assert controller.check(1.0) == pytest.approx(0.8)
    assert controller.check(1.99) == pytest.approx(0.8)
    assert controller.check(2.0) == pytest.approx(0.64)


def test_latencies_older_than_the_window_do_not_count_and_without_load_it_rises():
    controller = a_controller(0.5)
    controller.observe(9.0, 0.5)
    assert controller.p90_s(10.4) == 9.0
    assert controller.p90_s(10.5) is None
    assert controller.check(10.5) == pytest.approx(0.6)
