"""A genetic search over whole numbers: SwapMoE's way to share memory among layers (§3.5.2, settings of §4).

In each generation some configurations change one of their numbers, and a few are exchanged or averaged with another;
those that break a constraint are removed, and of all others the best stay. A configuration lives once in a population:
otherwise copies of the best soon are the whole of it, and nothing is left to search with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Configuration = tuple[int, ...]
#: Scores of configurations, higher is better, in their order.
Fitness = Callable[[Sequence[Configuration]], Sequence[float]]


class Rng(Protocol):
    """What of `random.Random` the search draws from."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The paper's: §4, genetic algorithm configurations."""

    population: int = 50
    mutation: float = 0.5
    crossover: float = 0.01
    generations: int = 5000


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What may be chosen: each number within its bounds, the sum at most `total`, and `allowed` of the whole."""

    lower: Configuration
    upper: Configuration
    total: int
    allowed: Callable[[Configuration], bool] = lambda _: True

    def __post_init__(self) -> None:
        if sum(self.lower) > self.total:
            raise ValueError(f"{self.lower} is the least that may be chosen and adds up to more than {self.total}")

    def holds(self, numbers: Configuration) -> bool:
        return sum(numbers) <= self.total and self.allowed(numbers)

    def draw(self, total: int, rng: Rng) -> Configuration:
        """Random numbers that add up to `total`, or to what the bounds allow of it; `allowed` is not asked."""
        numbers = list(self.lower)
        # Random weights, so that lopsided configurations are as likely as even ones.
        weights = [rng.random() for _ in numbers]
        for _ in range(min(total, sum(self.upper)) - sum(numbers)):
            below = [one for one, number in enumerate(numbers) if number < self.upper[one]]
            ticket = rng.random() * sum(weights[one] for one in below)
            chosen = below[-1]
            for one in below:
                ticket -= weights[one]
                if ticket <= 0:
                    chosen = one
                    break
            numbers[chosen] += 1
        return tuple(numbers)


def search(
    fitness: Fitness,
    space: SearchSpace,
    rng: Rng,
    *,
    start: Sequence[Configuration] = (),
    settings: SearchSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> Configuration:
    """The best configuration found. `start` is tried beside random ones; `progress` is told each generation.

    Raises ValueError where not even one of the first configurations is allowed.
    """
    settings = settings or SearchSettings()
    drawn = [space.draw(space.total, rng) for _ in range(settings.population)]
    first = [one for one in dict.fromkeys([*start, space.lower, *drawn]) if space.holds(one)]
    if not first:
        raise ValueError("no configuration was found that keeps the constraints; allow more memory or fewer loads")
    scores = dict(zip(first, fitness(first), strict=True))
    alive = _best(scores, first, settings.population)
    for generation in range(settings.generations):
        children = dict.fromkeys(_children(alive, space, rng, settings))
        fresh = [one for one in children if one not in scores and space.holds(one)]
        if fresh:
            scores.update(zip(fresh, fitness(fresh), strict=True))
            alive = _best(scores, [*alive, *fresh], settings.population)
        if progress is not None:
            progress(generation + 1)
    return alive[0]


def _best(
    scores: dict[Configuration, float], configurations: Sequence[Configuration], count: int
) -> list[Configuration]:
    return sorted(configurations, key=lambda one: (-scores[one], one))[:count]


def _children(
    alive: Sequence[Configuration], space: SearchSpace, rng: Rng, settings: SearchSettings
) -> list[Configuration]:
    children: list[Configuration] = []
    for one in alive:
        child = one
        if rng.random() < settings.crossover:
            child = _crossed(child, alive[rng.randrange(len(alive))], rng)
        if rng.random() < settings.mutation:
            child = _mutated(child, space, rng)
        if child != one:
            children.append(child)
    return children


def _mutated(numbers: Configuration, space: SearchSpace, rng: Rng) -> Configuration:
    """One number changed to any other that its bounds allow."""
    place = rng.randrange(len(numbers))
    value = space.lower[place] + rng.randrange(space.upper[place] - space.lower[place] + 1)
    return (*numbers[:place], value, *numbers[place + 1 :])


def _crossed(one: Configuration, other: Configuration, rng: Rng) -> Configuration:
    """Numbers exchanged at random, or averaged."""
    if rng.random() < 0.5:
        return tuple(a if rng.random() < 0.5 else b for a, b in zip(one, other, strict=True))
    return tuple((a + b) // 2 for a, b in zip(one, other, strict=True))
