"""The genetic search finds what a thorough search finds, keeps its constraints, and is the same each time."""

import random
from collections.abc import Sequence

import pytest

from experts.moe.policy.genetic import Configuration, SearchSettings, SearchSpace, search

LOWER, UPPER = (2,) * 6, (16,) * 6
GAIN = (1.0, 3.0, 9.0, 5.0, 2.0, 0.5)
QUICK = SearchSettings(generations=600)


def saturating(configurations: Sequence[Configuration]) -> list[float]:
    """Layers differ in how much an expert is worth, and each is worth less than the one before."""
    return [sum(gain * (1 - 0.8**count) for gain, count in zip(GAIN, counts, strict=True)) for counts in configurations]


def greedy(total: int) -> Configuration:
    """Return the exact optimum of a saturating worth: always take the expert that is worth most."""
    counts = list(LOWER)
    for _ in range(total - sum(counts)):
        best = max(
            (place for place in range(6) if counts[place] < UPPER[place]),
            key=lambda place: GAIN[place] * 0.8 ** counts[place],
        )
        counts[best] += 1
    return tuple(counts)


@pytest.mark.parametrize("total", [20, 48])
def test_the_search_comes_within_a_hundredth_of_the_exact_optimum(total: int):
    space = SearchSpace(LOWER, UPPER, total)
    best = search(saturating, space, random.Random(0), settings=QUICK)
    [optimum, reached] = saturating([greedy(total), best])
    assert reached >= 0.99 * optimum
    assert sum(best) <= total


def test_nothing_that_is_scored_breaks_a_bound_or_a_constraint():
    scored: list[Configuration] = []

    def watched(configurations: Sequence[Configuration]) -> list[float]:
        scored.extend(configurations)
        return saturating(configurations)

    space = SearchSpace(LOWER, UPPER, 40, allowed=lambda numbers: numbers[2] <= 7)
    best = search(watched, space, random.Random(1), settings=SearchSettings(generations=200))
    for numbers in [*scored, best]:
        assert sum(numbers) <= 40
        assert numbers[2] <= 7
        assert all(low <= number <= high for low, number, high in zip(LOWER, numbers, UPPER, strict=True))
    assert len(scored) == len(set(scored)), "nothing is scored twice"
