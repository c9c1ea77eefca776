"""K and B: one fit for the profile, the live benchmark and recorded runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.simulate.fit import fit_line, largest_useful_batch


def test_k_and_b_are_those_of_an_exact_line():
    line = fit_line((images, 0.02 * images + 0.05) for images in (1, 2, 4, 8))
    assert (line.k_s, line.b_s, line.residual) == (pytest.approx(0.02), pytest.approx(0.05), pytest.approx(0, abs=1e-9))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-5, 10)), min_size=1, max_size=8))
def test_no_constant_is_negative_whatever_was_measured(batches: list[tuple[int, float]]):
    line = fit_line(batches)
    assert line.k_s >= 0
    assert line.b_s >= 0
    assert 1 <= largest_useful_batch(line, max(batches)[0]) <= max(batches)[0]


def test_batches_stop_where_the_average_flattens():
    line = fit_line((images, 0.02 * images + 0.02) for images in (1, 2, 4, 8, 16))
    most = largest_useful_batch(line, 16)
    assert line.average_s(most) <= 1.03 * line.average_s(16) < line.average_s(most - 1)
    assert largest_useful_batch(fit_line([(1, 0.1), (2, 0.2), (4, 0.4)]), 4) == 1
