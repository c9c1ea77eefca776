"""Which experts run themselves and which are united (BrownoutServe §IV.C), and the latency controller (§IV.E)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.moe.policy.brownout import INTERVAL_S, WINDOW_S, LatencyController, busiest, groups_in_order, redirect

#: Figure 5a: 20 tokens at 8 experts.
FIGURE = (2, 4, 1, 5, 2, 1, 2, 3)
COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=24)
THRESHOLDS = st.one_of(st.sampled_from([tenth / 10 for tenth in range(11)]), st.floats(0.0, 1.0))


def test_the_worked_example_sends_12_of_20_tokens_to_three_experts():
    assert busiest(FIGURE, 0.6) == (3, 1, 7)
    assert redirect(FIGURE, 0.6, None) == [8, 1, 8, 3, 8, 8, 8, 7, 8]
    assert redirect(FIGURE, 0.6, groups_in_order(8, 4)) == [9, 1, 9, 3, 10, 10, 10, 7, 8]
    assert redirect(FIGURE, 1.0, None) == list(range(9))
    assert redirect((1, 0, 0, 5), 0.8, groups_in_order(4, 4)) == list(range(5)), "alone in its group"


@given(COUNTS, THRESHOLDS)
def test_the_busiest_hold_the_threshold_and_none_of_them_could_be_left_out(counts: list[int], threshold: float):
    experts = busiest(counts, threshold)
    total = sum(counts[expert] for expert in experts)
    needed = sum(counts) * threshold
    assert total >= needed - 1e-6
    assert not experts or total - counts[experts[-1]] < needed + 1e-6
    others = [count for expert, count in enumerate(counts) if expert not in experts]
    assert not experts or counts[experts[-1]] >= max(others, default=0)


def a_controller(threshold: float = 1.0) -> LatencyController:
    controller = LatencyController(slo_s=0.15)
    assert controller.check(0.0) == 1.0, "it begins without brownout"
    controller.threshold = threshold
    return controller


def test_above_the_slo_the_threshold_shrinks_once_per_interval():
    controller = a_controller()
    controller.observe(0.151, 1.0)
    assert controller.check(INTERVAL_S - 0.01) == 1.0
    assert controller.check(INTERVAL_S) == pytest.approx(0.8)
    assert controller.check(2 * INTERVAL_S - 0.01) == pytest.approx(0.8)
    assert controller.check(2 * INTERVAL_S) == pytest.approx(0.64)


def test_latencies_older_than_the_window_do_not_count_and_without_load_it_rises():
    controller = a_controller(0.5)
    controller.observe(9.0, 0.5)
    assert controller.p90_s(0.4 + WINDOW_S) == 9.0
    assert controller.p90_s(0.5 + WINDOW_S) is None
    assert controller.check(0.5 + WINDOW_S) == pytest.approx(0.6)
