import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.profile.fit import fit_line, largest_useful_batch
from tools.profile.window import SearchWindow, expected_next, search, windows


def test_windows_for_15_are_those_of_the_paper():
    windows_found = [(window.lower, window.upper) for window in itertools.islice(windows(15), 4)]
    expected = [(0, 15), (15, 27.75), (27.75, 38.5875), (38.5875, 47.799375)]
    assert windows_found == [pytest.approx(pair) for pair in expected]


@pytest.mark.parametrize("initial", [0, 100, -5, 250])
def test_a_window_that_would_not_decay_is_refused(initial: float):
    with pytest.raises(ValueError, match="between 0 and 100"):
        next(windows(initial))


def test_the_search_ends_in_the_window_where_throughput_leaves_its_trend():
    """Board A of the paper: 28 to 39 experts, since the third throughput is 7.7 % below the line of the first two."""
    throughputs = {15: 10.0, 28: 20.0, 39: 27.7}
    split = search(lambda experts: throughputs.get(experts, 25.0 if experts < 33 else 29.0), 370)
    assert [(trial.experts, trial.expected) for trial in split.trials] == [
        (15, None),
        (28, None),
        (39, pytest.approx(30.0)),
    ]
    assert split.trials[-1].window == SearchWindow(27.75, pytest.approx(38.5875))
    assert list(split.within) == [28, 32, 35, 39]
    assert (split.experts, split.images_per_s) == (35, 29.0)


def test_a_deviation_within_the_margin_goes_on():
    split = search(lambda experts: {15: 10.0, 28: 20.0, 39: 28.6, 48: 20.0}.get(experts, 1.0), 370)
    assert [trial.experts for trial in split.trials] == [15, 28, 39, 48]


def test_each_number_of_experts_is_measured_once():
    counts: list[int] = []

    def throughput(experts: int) -> float:
        counts.append(experts)
        return float(experts)

    split = search(throughput, 370)
    assert len(counts) == len(set(counts))
    assert split.measured().keys() == set(counts)


def test_of_equally_fast_splits_the_one_with_more_memory_for_batches_wins():
    assert search(lambda _experts: 5.0, 18).experts == 15


def test_a_number_at_random_lies_within_the_last_window_and_is_the_same_for_one_seed():
    splits = [search(lambda experts: float(min(experts, 30)), 370, pick="random", seed=seed) for seed in (1, 1, 2, 3)]
    assert splits[0].experts == splits[1].experts
    assert all(28 <= split.experts <= 39 for split in splits)


@settings(max_examples=60, deadline=None)
@given(
    most=st.integers(1, 400),
    initial=st.floats(1, 60),
    knee=st.integers(1, 400),
    pick=st.sampled_from(["best", "random"]),
)
def test_the_chosen_number_always_fits(most: int, initial: float, knee: int, pick):
    split = search(lambda experts: float(min(experts, knee)), most, initial=initial, pick=pick)
    assert 1 <= split.experts <= most
    assert all(trial.experts <= most for trial in split.trials)


def test_a_trend_needs_two_throughputs():
    assert expected_next([3.0]) is None
    assert expected_next([3.0, 5.0]) == pytest.approx(7.0)


def test_k_and_b_are_those_of_an_exact_line():
    line = fit_line({images: 0.02 * images + 0.05 for images in (1, 2, 4, 8)})
    assert (line.k_s, line.b_s, line.residual) == (pytest.approx(0.02), pytest.approx(0.05), pytest.approx(0, abs=1e-9))


def test_the_residual_is_the_largest_relative_error():
    line = fit_line({1: 0.1, 2: 0.2, 4: 0.44})
    errors = [abs((line.k_s * images + line.b_s) / seconds - 1) for images, seconds in ((1, 0.1), (2, 0.2), (4, 0.44))]
    assert line.residual == pytest.approx(max(errors))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(1, 64), st.floats(1e-5, 10), min_size=1, max_size=8))
def test_no_constant_is_negative_whatever_was_measured(latencies_s: dict[int, float]):
    line = fit_line(latencies_s)
    assert line.k_s >= 0
    assert line.b_s >= 0
    assert 1 <= largest_useful_batch(line, max(latencies_s)) <= max(latencies_s)


def test_batches_stop_where_the_average_flattens():
    line = fit_line({images: 0.02 * images + 0.02 for images in (1, 2, 4, 8, 16)})
    most = largest_useful_batch(line, 16)
    assert line.average_s(most) <= 1.03 * line.average_s(16) < line.average_s(most - 1)
    assert largest_useful_batch(fit_line({1: 0.1, 2: 0.2, 4: 0.4}), 4) == 1
