"""A genetic search over whole numbers, by which SwapMoE divides memory among layers (§3.5.2, settings of §4).

In each generation some configurations change one number and a few are crossed; those that break a constraint are
removed, the best of the others stay. Duplicates are removed: copies of the best would soon fill the population.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Configuration = tuple[int, ...]
#: Scores of configurations, higher is better, in their order.
Fitness = Callable[[Sequence[Configuration]], Sequence[float]]


class Rng(Protocol):
    """The part of `random.Random` that the search uses."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Settings of the search; the paper's by default (§4)."""

    population: int = 50
    mutation: float = 0.5
    crossover: float = 0.01
    generations: int = 5000


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Constraints: each number within its bounds, the sum at most `total`, and `allowed` true for the whole."""

    lower: Configuration
    upper: Configuration
    total: int
    allowed: Callable[[Configuration], bool] = lambda _: True

    def __post_init__(self) -> None:
        if sum(self.lower) > self.total:
            raise ValueError(f"the lower bounds {self.lower} add up to more than {self.total}")

    def holds(self, numbers: Configuration) -> bool:
        return sum(numbers) <= self.total and self.allowed(numbers)

    def draw(self, total: int, rng: Rng) -> Configuration:
        """Draw random numbers that add up to `total`, or as close as the bounds allow; ignores `allowed`."""
        numbers = list(self.lower)
        # Random weights, so that lopsided configurations are as likely as even ones.
        weights = [rng.random() for _ in numbers]
        for _ in range(min(total, sum(self.upper)) - sum(numbers)):
            below = [place for place, number in enumerate(numbers) if number < self.upper[place]]
            ticket = rng.random() * sum(weights[place] for place in below)
            winner = below[-1]
            for place in below:
                ticket -= weights[place]
                if ticket <= 0:
                    winner = place
                    break
            numbers[winner] += 1
        return tuple(numbers)


def search(
    fitness: Fitness,
    space: SearchSpace,
    rng: Rng,
    *,
    settings: SearchSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> Configuration:
    """Return the best configuration; `progress` gets each generation. ValueError if no first one is allowed."""
    settings = settings or SearchSettings()
    drawn = [space.draw(space.total, rng) for _ in range(settings.population)]
    first = [numbers for numbers in dict.fromkeys([space.lower, *drawn]) if space.holds(numbers)]
    if not first:
        raise ValueError("no configuration keeps the constraints; allow more memory or fewer loads")
    scores = dict(zip(first, fitness(first), strict=True))
    alive = _best(scores, first, settings.population)
    for generation in range(settings.generations):
        children = dict.fromkeys(_children(alive, space, rng, settings))
        fresh = [child for child in children if child not in scores and space.holds(child)]
        if fresh:
            scores.update(zip(fresh, fitness(fresh), strict=True))
            alive = _best(scores, [*alive, *fresh], settings.population)
        if progress is not None:
            progress(generation + 1)
    return alive[0]


def _best(
    scores: dict[Configuration, float], configurations: Sequence[Configuration], count: int
) -> list[Configuration]:
    return sorted(configurations, key=lambda numbers: (-scores[numbers], numbers))[:count]


def _children(
    alive: Sequence[Configuration], space: SearchSpace, rng: Rng, settings: SearchSettings
) -> list[Configuration]:
    children: list[Configuration] = []
    for parent in alive:
        child = parent
        if rng.random() < settings.crossover:
            child = _crossed(child, alive[rng.randrange(len(alive))], rng)
        if rng.random() < settings.mutation:
            child = _mutated(child, space, rng)
        if child != parent:
            children.append(child)
    return children


def _mutated(numbers: Configuration, space: SearchSpace, rng: Rng) -> Configuration:
    place = rng.randrange(len(numbers))
    value = space.lower[place] + rng.randrange(space.upper[place] - space.lower[place] + 1)
    return (*numbers[:place], value, *numbers[place + 1 :])


def _crossed(first: Configuration, second: Configuration, rng: Rng) -> Configuration:
    if rng.random() < 0.5:
        return tuple(a if rng.random() < 0.5 else b for a, b in zip(first, second, strict=True))
    return tuple((a + b) // 2 for a, b in zip(first, second, strict=True))
