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
    return [sum(gain * (1 - 0.8**count) for gain, count in zip(GAIN, one, strict=True)) for one in configurations]


def greedy(total: int) -> Configuration:
    """Exact where worth saturates: always the expert that is worth most."""
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
    found = search(saturating, space, random.Random(0), settings=QUICK)
    [best, reached] = saturating([greedy(total), found])
    assert reached >= 0.99 * best
    assert sum(found) <= total


def test_the_same_seed_finds_the_same():
    space = SearchSpace(LOWER, UPPER, 48)
    settings = SearchSettings(generations=50)
    runs = [search(saturating, space, random.Random(4), settings=settings) for _ in range(2)]
    assert runs[0] == runs[1]


def test_nothing_that_is_scored_breaks_a_bound_or_a_constraint():
    seen: list[Configuration] = []

    def watched(configurations: Sequence[Configuration]) -> list[float]:
        seen.extend(configurations)
        return saturating(configurations)

    space = SearchSpace(LOWER, UPPER, 40, allowed=lambda numbers: numbers[2] <= 7)
    found = search(watched, space, random.Random(1), settings=SearchSettings(generations=200))
    for one in [*seen, found]:
        assert sum(one) <= 40
        assert one[2] <= 7
        assert all(low <= number <= high for low, number, high in zip(LOWER, one, UPPER, strict=True))
    assert len(seen) == len(set(seen)), "nothing is scored twice"


def test_a_good_start_is_never_lost():
    space = SearchSpace(LOWER, UPPER, 48)
    start = greedy(48)
    assert search(saturating, space, random.Random(2), start=[start], settings=SearchSettings(generations=5)) == start


def test_random_configurations_use_the_total_within_the_bounds():
    space = SearchSpace(LOWER, UPPER, 96)
    rng = random.Random(3)
    drawn = [space.draw(40, rng) for _ in range(50)]
    assert all(sum(one) == 40 and min(one) >= 2 and max(one) <= 16 for one in drawn)
    assert len(set(drawn)) > 40
    assert space.draw(500, rng) == UPPER


def test_too_little_for_the_lower_bounds_and_nothing_allowed_are_said():
    with pytest.raises(ValueError, match="adds up to more than 11"):
        SearchSpace(LOWER, UPPER, 11)
    with pytest.raises(ValueError, match="allow more memory"):
        search(saturating, SearchSpace(LOWER, UPPER, 40, allowed=lambda _: False), random.Random(0), settings=QUICK)
