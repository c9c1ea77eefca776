"""What the daemon reads of the rules: immutable recipes, chains of experts, and how an answer is judged.

Everything here is a value or a pure function of values: the live daemon, the simulator and `coserve explain`
use the same objects. Steps are in `steps.py`, judging is in `judge.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from routing_rules.judge import SEVERITY, Judgement, Seen, Verdict, judge, worst
from routing_rules.steps import (
    ANY_LABEL,
    COMPONENT,
    ClassifierStep,
    DetectorStep,
    Requirement,
    Step,
    Task,
    chain,
    for_component,
)

__all__ = [
    "ANY_LABEL",
    "COMPONENT",
    "SEVERITY",
    "ClassifierStep",
    "DetectorStep",
    "Judgement",
    "Pattern",
    "Position",
    "Recipe",
    "Requirement",
    "Routes",
    "Seen",
    "Step",
    "Task",
    "Verdict",
    "chain",
    "for_component",
    "judge",
    "worst",
]


@dataclass(frozen=True, slots=True)
class Position:
    """One component type of a recipe: how many, and their designators where the recipe lists them."""

    quantity: int
    designators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one board type is expected to bring. `time_limit_s` is None where only completeness closes a board."""

    board_type: str
    positions: Mapping[str, Position] = field(hash=False)
    time_limit_s: float | None = None
    extras_allowed: bool = False
    share: float = 1.0

    @property
    def expected(self) -> int:
        """The number of positions of the board."""
        return sum(position.quantity for position in self.positions.values())


@dataclass(frozen=True, slots=True)
class Pattern:
    """A classifier of the rules before it is known which component it serves: experts may say `{component}`."""

    glob: str
    matches: re.Pattern[str]
    step: Step


@dataclass(frozen=True, slots=True)
class Routes:
    """Compiled rules. `tasks` are those of the catalog's experts, or None where they were compiled without one."""

    text: str
    sha256: str
    recipes: Mapping[str, Recipe] = field(hash=False)
    first_steps: Mapping[str, Mapping[str, Step]] = field(hash=False)
    patterns: tuple[Pattern, ...]
    tasks: Mapping[str, Task] | None = field(hash=False)
    expert_names: tuple[str, ...]
    usage_by_expert: Mapping[str, float] = field(hash=False)
    successors_by_expert: Mapping[str, tuple[tuple[str, float], ...]] = field(hash=False)

    @property
    def version(self) -> str:
        """The first 12 hex digits of the text's sha256 (RESULTS.md, `rules_version`)."""
        return self.sha256[:12]

    def first_step(self, board_type: str, component: str) -> Step | None:
        """Where an image's chain starts, or None where the rules do not know the board or the component on it."""
        steps = self.first_steps.get(board_type)
        if steps is None:
            return None
        step = steps.get(component)
        if step is None and self.recipes[board_type].extras_allowed:
            return self._extra(component)
        return step

    def experts(self) -> tuple[str, ...]:
        """Every expert that the recipes can use, in the order of the file."""
        return self.expert_names

    def usage(self) -> Mapping[str, float]:
        """The probability that an image uses the expert (CoServe §4.5): quantities × pass rates along the chain."""
        return self.usage_by_expert

    def successors(self) -> Mapping[str, tuple[tuple[str, float], ...]]:
        """The subsequent experts of each expert, with the share of its images that go on to each."""
        return self.successors_by_expert

    def _extra(self, component: str) -> Step | None:
        """The chain of a component that no recipe lists, unless the catalog lacks an expert of it."""
        for pattern in self.patterns:
            if pattern.matches.fullmatch(component):
                step = for_component(pattern.step, component)
                if self.tasks is None or all(self.tasks.get(part.expert) == part.task for part in chain(step)):
                    return step
                return None
        return None
