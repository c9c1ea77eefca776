"""Sizes as people read them: one style, and three digits however large."""

import pytest

from daemon.units import size_text


@pytest.mark.parametrize(
    ("size_bytes", "said"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (999.6, "1 kB"),
        (45_400, "45 kB"),
        (999_600, "1.0 MB"),
        (44_800_000, "44.8 MB"),
        (99_960_000, "100 MB"),
        (209_900_000, "210 MB"),
        (999_700_000, "1.0 GB"),
        (2 * 10**9, "2.0 GB"),
        (7_681 * 10**9, "7.7 TB"),
        (1_250 * 10**12, "1,250.0 TB"),
    ],
)
def test_a_size_has_three_digits_and_never_a_thousand_of_a_unit(size_bytes: float, said: str) -> None:
    assert size_text(size_bytes) == said
