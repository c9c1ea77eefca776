"""Decide about a roll-out of a release: one canary line, then the others in steps; all go back if a condition fails.

`decide` returns the next progress from the plan, its progress and the lines' reports; `wanted_numbers` returns the
release that each line should have. Lines that do not answer hold a roll-out up until the time for a step is over; then
all lines go back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Literal

#: Lines in each step after the canary, and the longest that a step may take.
LINES_PER_STEP = 2
STEP_S = 7 * 86400.0
#: Standard deviations of a 95 % interval.
_Z = 1.959964


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions that must hold on each line; one that is None is not checked.

    `images` must be judged first. The whole 95 % interval of the share of escapes among reviewed passes, and of false
    calls among reviewed failures, must be within these limits. The interval of the share of failures must come within
    `fail_change` of the earlier interval, and the 95th percentile of latency be at most `p95_ratio` times the earlier.
    `agreement` is the least share of answers of replaced versions that the new ones also give, with its interval.
    """

    images: int
    escapes: float | None = None
    false_calls: float | None = None
    fail_change: float | None = None
    p95_ratio: float | None = None
    agreement: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The lines of each step, `steps[0]` being the canary alone; `before` has the number that each line had."""

    number: int
    steps: tuple[tuple[str, ...], ...]
    before: Mapping[str, int]
    conditions: Conditions


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a roll-out is: lines of the steps up to `step` should have the release, or none when it goes back.

    `reason` says why it goes back, `waits` what it waits for; `state` is `all_old` once all lines have what they had.
    """

    step: int
    since_s: float
    direction: Literal["forward", "back"] = "forward"
    reason: str | None = None
    waits: str | None = None
    state: Literal["running", "all_new", "all_old"] = "running"

    def back(self, reason: str, now: float) -> "Progress":
        """Return the progress after which every line goes back to what it had."""
        return Progress(self.step, now, "back", reason)


@dataclass(frozen=True, slots=True)
class Share:
    """`count` out of `of`."""

    count: int = 0
    of: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the share (Wilson); 0 to 1 if `of` is 0."""
        if self.of == 0:
            return 0.0, 1.0
        share, n = self.count / self.of, self.of
        middle, square = share + _Z**2 / (2 * n), _Z**2 / n
        half = _Z * sqrt(share * (1 - share) / n + square / (4 * n))
        return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


@dataclass(frozen=True, slots=True)
class Figures:
    """Shares and latency of the images that a line judged with a release; `p95_ms` is None without images.

    `agreed`: answers of the versions that it replaced that are the same, None if it replaced none.
    """

    failed: Share = Share()
    escapes: Share = Share()
    false_calls: Share = Share()
    p95_ms: float | None = None
    agreed: Share | None = None


@dataclass(frozen=True, slots=True)
class LineReport:
    """A line's newest report: the number in force, why it refused the wanted one, its figures with each.

    `may_be_taking`: it has not reported since lines should go back, so it may still be pulling the release.
    """

    number: int | None
    problem: str | None = None
    now: Figures = Figures()
    before: Figures = Figures()
    may_be_taking: bool = False


class NoPlanError(Exception):
    """A roll-out cannot begin, because it could not go back; the text says why and what to do."""


def plan_rollout(
    number: int, back_to: int | None, canary: str, present: Mapping[str, int], conditions: Conditions
) -> Plan:
    """Return the plan for lines that have the numbers `present`; the release allows going back to `back_to`.

    Raises NoPlanError.
    """
    if canary not in present:
        raise NoPlanError(
            f"{canary} has no release of this name, so there is none to go back to; lines that have one:"
            f" {', '.join(present) or 'none'} (pull one there, then run `coserve plant follow`)"
        )
    if present[canary] == number:
        raise NoPlanError(f"{canary} has number {number} already: name another canary")
    others = [line for line, has in present.items() if has != number and line != canary]
    before = {line: present[line] for line in (canary, *others)}
    for line, has in before.items():
        if back_to is None:
            raise NoPlanError(
                f"number {number} is the first of its name and allows no way back: `coserve plant pull` it on each line"
            )
        if not back_to <= has < number:
            raise NoPlanError(
                f"number {number} allows going back to {back_to}, and {line} has {has}: pull {back_to} there first"
            )
    steps = (tuple(others[at : at + LINES_PER_STEP]) for at in range(0, len(others), LINES_PER_STEP))
    return Plan(number, ((canary,), *steps), before, conditions)


def wanted_numbers(plan: Plan, progress: Progress) -> dict[str, int]:
    """Return the number that each line should have now."""
    until = progress.step if progress.direction == "forward" else -1
    return {
        line: plan.number if at <= until else plan.before[line] for at, step in enumerate(plan.steps) for line in step
    }


def must_compare(plan: Plan, progress: Progress, line: str, number: int) -> bool:
    """Return True if a line that has `number` should compare its answers with those of the versions before."""
    asks = plan.conditions.agreement is not None
    return asks and wanted_numbers(plan, progress).get(line) == plan.number == number


def decide(plan: Plan, progress: Progress, reports: Mapping[str, LineReport], now: float) -> Progress:
    """Return how far it is next. A line without a report has not answered."""
    targets = wanted_numbers(plan, progress)
    late = [line for line, number in targets.items() if line not in reports or reports[line].number != number]
    asked = [line for step in plan.steps[: progress.step + 1] for line in step]
    if progress.direction == "back":
        late = [line for line in targets if line in late or (line in asked and reports[line].may_be_taking)]
        waits = f"for {', '.join(late)} to go back" if late else None
        return replace(progress, waits=waits, state="running" if late else "all_old")
    for line in asked:
        report = reports.get(line)
        if report is not None and report.problem is not None:
            return progress.back(f"{line} refused it: {report.problem}", now)
        if report is not None and report.number == plan.number and (failure := failed_condition(plan, line, report)):
            return progress.back(failure, now)
    missing = [line for line in asked if line in late]
    if missing:
        waits = f"for {', '.join(missing)} to take it"
    else:
        open_points = [point for line in asked if (point := unmet_condition(plan.conditions, line, reports[line]))]
        if not open_points:
            is_last = progress.step + 1 == len(plan.steps)
            return replace(progress, waits=None, state="all_new") if is_last else Progress(progress.step + 1, now)
        waits = f"for {'; '.join(open_points)}"
    if now - progress.since_s > STEP_S:
        too_long = f"step {progress.step + 1} took longer than {STEP_S / 86400:g} days"
        return progress.back(f"{too_long}: it waited {waits}", now)
    return replace(progress, waits=waits)


def failed_condition(plan: Plan, line: str, report: LineReport) -> str | None:
    """Return in words a condition that certainly fails on a line, None if none does."""
    asked, now, before = plan.conditions, report.now, report.before
    for name, limit, share in _reviewed(asked, now):
        if share.interval[0] > limit:
            return f"{line}: {share.count} {name} in {share.of} reviewed, more than {limit:g} of them"
    if asked.agreement is not None and now.agreed is not None and now.agreed.interval[1] < asked.agreement:
        return f"{line}: {now.agreed.count} of {now.agreed.of} answers are as before, less than {asked.agreement:g}"
    if asked.fail_change is not None and now.failed.of >= asked.images and before.failed.of:
        (low, high), (old_low, old_high) = now.failed.interval, before.failed.interval
        if low > old_high + asked.fail_change or high < old_low - asked.fail_change:
            return f"{line}: {low:.1%} to {high:.1%} of its images fail, before {old_low:.1%} to {old_high:.1%}"
    p95_ms, old_ms = now.p95_ms or 0.0, inf if before.p95_ms is None else before.p95_ms
    if asked.p95_ratio is not None and now.failed.of >= asked.images and p95_ms > asked.p95_ratio * old_ms:
        return f"{line}: 95 % of its images take up to {p95_ms:.0f} ms, before {old_ms:.0f} ms"
    return None


def unmet_condition(asked: Conditions, line: str, report: LineReport) -> str | None:
    """Return in words what a line still needs before its conditions certainly hold, None if they do."""
    now = report.now
    if now.failed.of < asked.images:
        return f"{line} to judge {asked.images} images ({now.failed.of} so far)"
    compared = (asked.fail_change, report.before.failed.of or None), (asked.p95_ratio, report.before.p95_ms)
    if any(limit is not None and earlier is None for limit, earlier in compared):
        return f"images of the 30 days before at {line} to compare with: none"
    for name, limit, share in _reviewed(asked, now):
        if share.interval[1] > limit:
            return f"reviews at {line}: {share.count} {name} in {share.of} leave up to {share.interval[1]:.1%} possible"
    if asked.agreement is not None and now.agreed is not None and now.agreed.interval[0] < asked.agreement:
        return f"more answers of the versions before at {line}: {now.agreed.count} of {now.agreed.of} are the same"
    return None


def _reviewed(asked: Conditions, now: Figures) -> list[tuple[str, float, Share]]:
    """Return the name, the limit and the share of each condition that reviews must meet."""
    limits = (("escapes", asked.escapes, now.escapes), ("false calls", asked.false_calls, now.false_calls))
    return [(name, limit, share) for name, limit, share in limits if limit is not None]
