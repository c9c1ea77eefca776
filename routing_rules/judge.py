"""How an expert's answer becomes a verdict, and what comes next: pure functions of values (docs/rules.md in words)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from routing_rules.steps import ANY_LABEL, ClassifierStep, DetectorStep, Requirement, Step

Verdict = Literal["pass", "fail", "review", "unknown"]

#: Worst first: a board, or a chain of stages, takes the worst verdict among its parts (PROTOCOL.md, Boards).
SEVERITY: tuple[Verdict, ...] = ("fail", "unknown", "review", "pass")


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict that wins among `verdicts` (not empty): fail, then unknown, then review, then pass."""
    return min(verdicts, key=SEVERITY.index)


class Seen(Protocol):
    """One detection, as the rules look at it; box is (x1, y1, x2, y2) in pixels of the stored image."""

    @property
    def label(self) -> str: ...
    @property
    def confidence(self) -> float: ...
    @property
    def box(self) -> tuple[float, float, float, float]: ...


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of a chain so far, the defect it names, and the step that comes next (None: the chain ends)."""

    verdict: Verdict
    defect: str | None
    next: Step | None


def judge(
    step: Step,
    label: str | None,
    confidence: float | None,
    detections: Sequence[Seen],
    so_far: Judgement | None,
    image_size: tuple[int, int] | None = None,
) -> Judgement:
    """Judge one expert's answer, after what the chain before it gave; docs/rules.md says it in words.

    The worst verdict of the chain wins; among equals, the later defect. A failure ends the chain. `image_size` is
    (width, height) of the stored image; without it a box that must lie somewhere counts as unsure.
    """
    if isinstance(step, ClassifierStep):
        found = _classified(step, label, confidence)
    else:
        found = _detected(step, detections, image_size)
    if so_far is not None:
        verdict = worst((so_far.verdict, found.verdict))
        defects = [part.defect for part in (found, so_far) if part.verdict == verdict and part.defect is not None]
        found = Judgement(verdict, defects[0] if defects else None, found.next)
    return replace(found, next=None) if found.verdict == "fail" else found


def _classified(step: ClassifierStep, label: str | None, confidence: float | None) -> Judgement:
    if label is None:
        return Judgement("review", None, None)
    # Written so that a confidence that is not a number is unsure, never sure.
    sure = confidence is not None and confidence >= step.review_below
    onward = step.goes_to(label)
    if label in step.pass_labels:
        return Judgement("pass" if sure else "review", None, onward)
    code = step.codes.get(label, label)
    if onward is None:
        return Judgement("fail" if sure else "review", code, None)
    if sure and step.on_clear == "pass":
        return Judgement("pass", None, onward)
    return Judgement("review", code, onward)


def _detected(step: DetectorStep, detections: Sequence[Seen], image_size: tuple[int, int] | None) -> Judgement:
    by_confidence = sorted(detections, key=lambda seen: -seen.confidence)
    onward = _onward(step, by_confidence)
    failures, reviews = list[str](), list[str]()
    for seen in by_confidence:
        fail_from, review_from = _threshold(step.fail_on, seen.label), _threshold(step.review_on, seen.label)
        # "Not less" and then "at least": a confidence that is not a number ends as unsure, not as unseen.
        if fail_from is not None and not seen.confidence < fail_from:
            (failures if seen.confidence >= step.review_below else reviews).append(seen.label)
        elif review_from is not None and not seen.confidence < review_from:
            reviews.append(seen.label)
    for requirement in step.require:
        verdict, defect = _required(requirement, detections, image_size)
        if verdict != "pass":
            (failures if verdict == "fail" else reviews).append(defect)
    if failures:
        return Judgement("fail", step.codes.get(failures[0], failures[0]), None)
    if reviews:
        return Judgement("review", step.codes.get(reviews[0], reviews[0]), onward)
    return Judgement("pass", None, onward)


def _onward(step: DetectorStep, by_confidence: Sequence[Seen]) -> Step | None:
    named = dict(step.branches)
    for seen in by_confidence:
        if seen.label in named:
            return named[seen.label]
    return step.otherwise


def _threshold(thresholds: tuple[tuple[str, float], ...], label: str) -> float | None:
    named = dict(thresholds)
    return named.get(label, named.get(ANY_LABEL))


def _required(
    requirement: Requirement, detections: Sequence[Seen], image_size: tuple[int, int] | None
) -> tuple[Verdict, str]:
    """Whether the count is right, and the name of what is wrong with it.

    Boxes below the confidence may or may not be there, so the true count lies between the certain ones and all of
    them: right for every such count is a pass, for none a failure, for some a review.
    """
    everywhere = [seen for seen in detections if seen.label == requirement.label]
    here = everywhere
    if requirement.is_placed and image_size is not None:
        here = [seen for seen in everywhere if requirement.holds(seen.box, image_size)]
    certain = [seen for seen in here if seen.confidence >= requirement.confidence]
    at_most = len(here)
    at_least = 0 if requirement.is_placed and image_size is None else len(certain)
    minimum, maximum = requirement.minimum, math.inf if requirement.maximum is None else requirement.maximum
    if at_least >= minimum and at_most <= maximum:
        return "pass", ""
    if at_least < minimum:
        elsewhere = sum(seen.confidence >= requirement.confidence for seen in everywhere)
        wrong = "misplaced" if requirement.is_placed and image_size is not None and elsewhere >= minimum else "missing"
    else:
        wrong = "extra"
    return ("fail" if at_most < minimum or at_least > maximum else "review"), f"{wrong}_{requirement.label}"
