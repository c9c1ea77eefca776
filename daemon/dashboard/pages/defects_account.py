"""The account of the page Defects: counted rows in, tables out. The verdict that counts is a person's, else the line's.

A false call is a `fail` of the line that a person turned into a pass; an escape is a `pass` that a person turned into a
fail: as the view `false_calls` has them. Shares are fractions.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Grouping = Literal["both", "defect", "component"]
VERDICTS = ("pass", "fail", "review", "unknown")


class NotPassed(Protocol):
    """A row of questions_defects.not_passed."""

    day: str
    lot: str | None
    station: str | None
    component: str
    said: str | None
    decided: str | None
    defect: str | None
    images: int


@dataclass(slots=True)
class Tally:
    """Images of one day, lot, station or component: `final` by verdict; `waiting` have no verdict yet."""

    name: str
    images: int = 0
    waiting: int = 0
    reviewed: int = 0
    false_calls: int = 0
    escapes: int = 0
    not_passed: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def judged(self) -> int:
        return max(0, self.images - self.waiting)

    @property
    def final(self) -> dict[str, int]:
        """By the verdict that counts."""
        others = {verdict: self.not_passed.get(verdict, 0) for verdict in VERDICTS[1:]}
        return {"pass": max(0, self.judged - sum(others.values())), **others}

    @property
    def fail_rate(self) -> float | None:
        return self.final["fail"] / self.judged if self.judged else None

    @property
    def false_call_rate(self) -> float | None:
        """False calls of all images judged: what people looked at in vain."""
        return self.false_calls / self.judged if self.judged else None

    def add(self, row: NotPassed) -> None:
        """What is no plain pass; a pass by a person's word stays among the passes."""
        if row.said is None:
            self.waiting += row.images
            return
        final = row.decided or row.said
        if final != "pass":
            self.not_passed[final] += row.images
        if row.decided is not None:
            self.reviewed += row.images
        if (row.said, row.decided) == ("fail", "pass"):
            self.false_calls += row.images
        elif (row.said, row.decided) == ("pass", "fail"):
            self.escapes += row.images


@dataclass(frozen=True, slots=True)
class Bar:
    """One cause of the Pareto chart; `share` of all fails, `cumulative` up to here."""

    component: str | None
    defect: str | None
    count: int
    share: float
    cumulative: float

    def name(self, by: Grouping) -> str:
        code = self.defect or "no code"
        return code if by == "defect" else str(self.component) if by == "component" else f"{code} {self.component}"


@dataclass(frozen=True, slots=True)
class Account:
    """All tables of one span."""

    total: Tally
    boards: int
    days: list[Tally]
    lots: list[Tally]
    stations: list[Tally]
    components: list[Tally]
    bars: list[Bar]


def account(
    rows: Sequence[NotPassed], by_board: Iterable[Any], by_component: Iterable[Any], grouping: Grouping
) -> Account:
    """`by_board` has day, lot, station, boards and images; `by_component` component and images."""
    total, boards = Tally("all"), 0
    days: dict[str, Tally] = {}
    lots: dict[str, Tally] = {}
    stations: dict[str, Tally] = {}
    components: dict[str, Tally] = {}
    for group in by_board:
        boards += group.boards
        for tallies, name in ((days, group.day), (lots, group.lot), (stations, group.station)):
            _of(tallies, name).images += group.images
        total.images += group.images
    for group in by_component:
        _of(components, group.component).images += group.images
    for row in rows:
        for tallies, name in ((days, row.day), (lots, row.lot), (stations, row.station), (components, row.component)):
            _of(tallies, name).add(row)
        total.add(row)
    return Account(
        total=total,
        boards=boards,
        days=sorted(days.values(), key=lambda tally: tally.name),
        lots=_worst_first(lots),
        stations=_worst_first(stations),
        components=_worst_first(components),
        bars=pareto(rows, grouping),
    )


def pareto(rows: Iterable[NotPassed], by: Grouping) -> list[Bar]:
    """What failed, by the verdict that counts, most frequent first."""
    counts: dict[tuple[str | None, str | None], int] = defaultdict(int)
    for row in rows:
        if (row.decided or row.said) == "fail":
            component = None if by == "defect" else row.component
            counts[component, None if by == "component" else row.defect] += row.images
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0][0] or "", item[0][1] or ""))
    total, so_far, bars = sum(counts.values()), 0, []
    for (component, defect), count in ordered:
        so_far += count
        bars.append(Bar(component, defect, count, count / total, so_far / total))
    return bars


def _of(tallies: dict[str, Tally], name: str | None) -> Tally:
    """Boards without a lot or a station have the empty name."""
    key = name or ""
    if key not in tallies:
        tallies[key] = Tally(key)
    return tallies[key]


def _worst_first(tallies: dict[str, Tally]) -> list[Tally]:
    return sorted(tallies.values(), key=lambda tally: (-(tally.final["fail"]), -tally.images, tally.name))
