"""Which attempt at a board an image belongs to, when an attempt closes, and what it then says (PROTOCOL.md, Boards).

Pure state and pure decisions: no database, no clock. The store rebuilds an `Attempt` from rows by telling it again
what it was told when those rows were written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from routing_rules.routes import Verdict, worst

Reason = Literal["complete", "time_limit"]

#: The largest number that a message and a row can hold.
MAX_ATTEMPT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Place:
    """What a recipe expects of one component type: `quantity` images, at `designators` where the recipe lists them."""

    component: str
    quantity: int
    designators: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A recipe as an attempt keeps it from opening to closing."""

    places: tuple[Place, ...]
    time_limit_s: float | None = None

    @property
    def expected(self) -> int:
        return sum(place.quantity for place in self.places)


@dataclass(frozen=True, slots=True)
class Closing:
    """What a closed attempt says, once and for good."""

    verdict: Verdict
    reason: Reason
    inspected: int
    failed: list[dict[str, Any]]
    missing: list[dict[str, Any]]


@dataclass(slots=True)
class Attempt:
    """One attempt at one board. `seen` and `judged` hold each component's designators, so that a repeat counts once."""

    board_id: int
    number: int
    plan: Plan
    closed: bool = False
    pending: int = 0
    worst: Verdict = "pass"
    seen: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    judged: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    failures: dict[tuple[str, str], tuple[int, str | None]] = field(
        default_factory=dict[tuple[str, str], tuple[int, str | None]]
    )

    def take(self, component: str, designator: str) -> None:
        """An image was accepted into this attempt."""
        self.seen.setdefault(component, set()).add(designator)
        self.pending += 1

    def judge(self, inspection_id: int, component: str, designator: str, verdict: Verdict, defect: str | None) -> None:
        """An image that was taken has its verdict. A closed attempt remembers no more than that it is not pending."""
        self.pending -= 1
        if self.closed:
            return
        self.judged.setdefault(component, set()).add(designator)
        self.worst = worst((self.worst, verdict))
        if verdict == "fail":
            place = (component, designator)
            first = self.failures.get(place)
            if first is None or inspection_id < first[0]:
                self.failures[place] = (inspection_id, defect)

    def lacks(self, component: str, designator: str) -> bool:
        """Whether an image of `designator` would fill a position that no accepted image fills yet."""
        for place in self.plan.places:
            if place.component == component:
                seen = self.seen.get(component, set())
                if designator in seen:
                    return False
                return designator in place.designators if place.designators is not None else len(seen) < place.quantity
        return False

    @property
    def inspected(self) -> int:
        """Positions with a verdict; extras and repeats are none."""
        return sum(_filled(place, self.judged) for place in self.plan.places)

    @property
    def is_complete(self) -> bool:
        """Every expected position has a verdict and nothing that was accepted is pending."""
        return not self.closed and self.pending == 0 and self.inspected == self.plan.expected

    def closing(self, reason: Reason) -> Closing:
        """What closing now says; what is missing or still pending was not judged, so the verdict is no pass."""
        missing = [
            _missing(place, self.judged) for place in self.plan.places if _filled(place, self.judged) < place.quantity
        ]
        unjudged = bool(missing) or self.pending > 0
        failures = sorted(self.failures.items(), key=lambda item: item[1][0])
        return Closing(
            verdict=worst((self.worst, "unknown")) if unjudged else self.worst,
            reason=reason,
            inspected=self.inspected,
            failed=[
                {"designator": designator, "component": component, "defect": defect}
                for (component, designator), (_, defect) in failures
            ],
            missing=missing,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """Where an image goes: attempt `number`, which `opens` with it or, closed already, takes it `late`."""

    number: int
    opens: bool = False
    late: bool = False


def choose(attempts: Mapping[int, Attempt], named: int | None, component: str, designator: str) -> Choice:
    """The attempt of an image, given all attempts at its board and the one its publisher named, if any."""
    if named is not None:
        attempt = attempts.get(named)
        if attempt is None:
            return Choice(named, opens=True)
        if choice := _joins(attempt, component, designator):
            return choice
    newest = max(attempts, default=0)
    if newest and (choice := _joins(attempts[newest], component, designator)):
        return choice
    return Choice(_next(newest, attempts), opens=True)


def _next(newest: int, attempts: Mapping[int, Attempt]) -> int:
    if newest < MAX_ATTEMPT:
        return newest + 1
    return next(number for number in count(1) if number not in attempts)  # somebody named the last there is


def _joins(attempt: Attempt, component: str, designator: str) -> Choice | None:
    if not attempt.closed:
        return Choice(attempt.number)
    return Choice(attempt.number, late=True) if attempt.lacks(component, designator) else None


def _filled(place: Place, designators: Mapping[str, set[str]]) -> int:
    there = designators.get(place.component)
    if not there:
        return 0
    if place.designators is not None:
        return sum(designator in there for designator in place.designators)
    return min(place.quantity, len(there))


def _missing(place: Place, judged: Mapping[str, set[str]]) -> dict[str, Any]:
    entry: dict[str, Any] = {"component": place.component, "count": place.quantity - _filled(place, judged)}
    if place.designators is not None:
        there = judged.get(place.component, set())
        entry["designators"] = [designator for designator in place.designators if designator not in there]
    return entry
