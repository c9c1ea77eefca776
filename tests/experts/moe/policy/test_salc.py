"""The latency controller (BrownoutServe §IV.E, Algorithm 2): down by a fifth above the SLO, up by a tenth below."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.moe.policy.salc import LatencyController, Salc, SalcRule

RULE = SalcRule(slo_s=0.15, window_s=10.0, interval_s=1.0)


def a_controller(threshold: float = 1.0) -> LatencyController:
    controller = LatencyController(RULE)
    controller.check(0.0)
    controller.threshold = threshold
    return controller


def test_it_begins_without_brownout():
    assert LatencyController(RULE).check(0.0) == 1.0


def test_above_the_slo_the_threshold_shrinks():
    controller = a_controller()
    controller.observe(0.151, 0.5)
    assert controller.check(1.0) == pytest.approx(0.8)
    assert controller.check(2.0) == pytest.approx(0.64)


def test_below_the_warning_line_it_rises_to_1_exactly_and_no_further():
    controller = a_controller(0.1)
    for second in range(1, 12):
        controller.observe(0.119, float(second))
        controller.check(float(second))
    assert controller.threshold == 1.0


def test_between_warning_line_and_slo_nothing_changes():
    controller = a_controller(0.5)
    controller.observe(0.12, 0.5)
    assert controller.check(1.0) == 0.5
    controller.observe(0.15, 1.5)
    assert controller.check(2.0) == 0.5


def test_one_late_token_of_ten_is_no_reason_and_two_are():
    controller = a_controller()
    for tenth in range(9):
        controller.observe(0.13, tenth / 10)
    controller.observe(9.0, 0.95)
    assert controller.check(1.0) == 1.0
    controller.observe(9.0, 1.5)
    assert controller.check(2.0) == pytest.approx(0.8)


def test_latencies_older_than_the_window_do_not_count():
    controller = a_controller(0.5)
    controller.observe(9.0, 0.5)
    assert controller.p90_s(10.4) == 9.0
    assert controller.p90_s(10.5) is None


def test_without_load_it_returns():
    assert a_controller(0.5).check(1.0) == pytest.approx(0.6)


def test_between_two_intervals_nothing_changes():
    controller = a_controller()
    controller.observe(9.0, 0.0)
    assert controller.check(0.99) == 1.0
    assert controller.check(1.0) == pytest.approx(0.8)
    assert controller.check(1.99) == pytest.approx(0.8)


def test_prefill_and_decode_each_have_their_own_slo_and_threshold():
    salc = Salc(prefill=SalcRule(slo_s=0.25, interval_s=1.0), decode=SalcRule(slo_s=0.15, interval_s=1.0))
    salc.check(0.0)
    salc.observe("prefill", 0.24, 0.5)
    salc.observe("decode", 0.24, 0.5)
    assert salc.check(1.0) == {"prefill": 1.0, "decode": pytest.approx(0.8)}


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 10.0)), max_size=60))
def test_the_threshold_stays_between_0_and_1(events: list[tuple[float, float]]):
    controller = LatencyController(RULE)
    now = 0.0
    for latency_s, pause_s in events:
        now += pause_s
        controller.observe(latency_s, now)
        assert 0.0 <= controller.check(now) <= 1.0
