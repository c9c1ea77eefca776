"""Rounds of a benchmark: its sides take turns, each round beginning with another one; medians, spreads, ratios."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

from tools.terminal.console import errors

R = TypeVar("R")
Runs = dict[str, list[R]]


class Spread(NamedTuple):
    """The median of a figure over all rounds, and its range."""

    median: float
    lowest: float
    highest: float

    def text(self, digits: int) -> str:
        """Return it as `29.7 (29.1–30.2)`."""
        return f"{self.median:.{digits}f} ({self.lowest:.{digits}f}–{self.highest:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratio of each round in which both sides ran: drift of the machine meets both alike."""
    return [value / other for value, other in zip(values, base, strict=False)]


def run_in_turn(
    sides: Mapping[str, Callable[[], R]],
    rounds: int,
    on_run: Callable[[str], None] | None = None,
    is_wanted: Callable[[str, Runs[R]], bool] = lambda _name, _runs: True,
) -> Runs[R]:
    """Run every side that `is_wanted` once a round, interleaved; `on_run` gets its name before, else a bar shows it."""
    if on_run is None:
        from tools.terminal.console import Bars

        with Bars(console=errors) as bar:
            task = bar.add_task("runs", total=rounds * len(sides))
            return run_in_turn(sides, rounds, lambda name: bar.update(task, description=name, advance=1), is_wanted)
    names, runs = list(sides), {name: list[R]() for name in sides}
    for first in (number % len(names) for number in range(rounds)):
        for name in names[first:] + names[:first]:
            on_run(name)
            if is_wanted(name, runs):
                runs[name].append(sides[name]())
    return runs
