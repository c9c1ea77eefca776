from collections.abc import Callable
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.papers_window import paper_choice
from tools.profile.split import best_count


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
