from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.profile.window import best_count, paper_choice


def test_the_papers_windows_shrink_by_a_decay_factor_of_its_own_figures():
    """0-15, 15-27.75, 27.75-38.59 …"""
    assert list(paper_choice(lambda experts: 10.0, 370).tried)[:4] == [15, 28, 39, 48]


def test_the_papers_window_ends_where_throughput_leaves_its_trend():
    """Board A of the paper: 28 to 39 experts, since the third throughput is 7.7 % below the line of the first two."""
    throughputs = {15: 10.0, 28: 20.0, 39: 27.7}
    paper = paper_choice(lambda experts: throughputs.get(experts, 25.0), 370)
    assert paper.tried == throughputs
    assert paper.window == (28, 39)
    assert 28 <= paper.experts <= 39


def test_a_deviation_within_the_margin_goes_on():
    paper = paper_choice(lambda experts: {15: 10.0, 28: 20.0, 39: 28.6, 48: 20.0}.get(experts, 1.0), 370)
    assert list(paper.tried) == [15, 28, 39, 48]


def test_the_papers_windows_end_before_a_hundred_experts_where_each_expert_more_pays():
    """Why its rule only stands beside ours: it stops at 48, since its line over shrinking windows overestimates."""
    assert paper_choice(float, 370).window == (39, 48)
    assert next(iter(best_count(float, 1, 370))) == 370


@st.composite
def throughputs(draw: st.DrawFn) -> tuple[Callable[[int], float], int, int]:
    """A curve over experts: linear or saturating, then maybe falling behind a knee, with noise; and the two ends."""
    lowest = draw(st.integers(1, 400))
    highest = draw(st.integers(lowest, 600))
    slope, knee = draw(st.floats(0, 2)), draw(st.integers(1, 700))
    half = draw(st.none() | st.floats(1, 300))
    fall = draw(st.floats(0, 3))
    noise = draw(st.sampled_from([0.0, 0.0, 0.02, 0.2]))
    seed = draw(st.integers(0, 99))

    def throughput(experts: int) -> float:
        rising = min(experts, knee)
        rate = 5 + slope * (rising if half is None else half * rising / (half + rising))
        rate -= fall * slope * max(0, experts - knee)
        return max(0.0, rate) * (1 + noise * (Random(seed * 1000 + experts).random() - 0.5))

    return throughput, lowest, highest


@settings(max_examples=300, deadline=None)
@given(throughputs())
def test_the_choice_is_never_worse_than_full_batches_first_or_than_all_experts(curve):
    throughput, lowest, highest = curve
    asked: list[int] = []

    def measured(experts: int) -> float:
        asked.append(experts)
        return throughput(experts)

    speeds = best_count(measured, lowest, highest)
    best = next(iter(speeds))
    assert lowest <= best <= highest
    assert speeds[best] == throughput(best) >= max(throughput(lowest), throughput(highest))
    assert len(asked) == len(set(asked)), "a number was measured twice"
    assert {lowest, highest} <= speeds.keys() == set(asked)


@settings(max_examples=200, deadline=None)
@given(lowest=st.integers(1, 200), width=st.integers(0, 400), peak=st.floats(0, 1), fall=st.floats(0.01, 3))
def test_a_peak_between_the_ends_is_hit_to_the_expert_in_a_few_trials(
    lowest: int, width: int, peak: float, fall: float
):
    best = lowest + round(peak * width)
    speeds = best_count(lambda n: 1000.0 + (n - best if n < best else fall * (best - n)), lowest, lowest + width)
    assert next(iter(speeds)) == best
    assert len(speeds) <= 24


def test_of_equally_fast_splits_the_one_with_more_memory_for_batches_wins():
    assert next(iter(best_count(lambda _experts: 5.0, 7, 300))) == 7


def test_memory_without_room_for_an_expert_is_refused():
    with pytest.raises(ValueError, match="memory for at least one expert"):
        best_count(lambda _experts: 5.0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(most=st.integers(1, 400), knee=st.integers(1, 400), seed=st.integers(0, 9))
def test_the_papers_number_always_fits(most: int, knee: int, seed: int):
    paper = paper_choice(lambda experts: float(min(experts, knee)), most, seed)
    assert 1 <= paper.experts <= most
    assert all(count <= most for count in paper.tried)
