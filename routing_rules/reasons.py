"""Stored answers judged again, and the step and limit that decided a verdict, in a sentence for people.

Everything comes from `judge`, with a rule cut down to one part where a part must be found: no sentence can contradict
the verdict.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from routing_rules.routes import ClassifierStep, DetectorStep, Judgement, Requirement, Seen, Step, judge, threshold

#: The meaning of a stored `reason`, and the remedy.
REASONS: dict[str | None, tuple[str, ...]] = {
    "deadline": (
        "its deadline passed, or could not be met, before its verdict was stored",
        "See what made it wait (`coserve queues`, question 7 of docs/results.md), or let the camera give more time",
    ),
    "expert_failed": (
        "an expert could not be loaded, or ended with an error",
        "`coserve experts` lists what failed, `coserve check` reads every weights file, the daemon's log has the error",
    ),
    "bad_image": (
        "its bytes could not be decoded, although its header was sound",
        "Look at camera and cable; the daemon's log says what is wrong and where a copy lies (event image_quarantined)",
    ),
    "edition_gone": (
        "its board began in an edition of rules and experts that no longer serves",
        "Send the board again as a new attempt",
    ),
    "no_expert": ("no expert judges it yet", "Train one on pictures like it"),
    "repeated_picture": (
        "its source had just sent the same picture for another place or board",
        "Check whether its camera is frozen",
    ),
    "picture_quality": ("its picture cannot be judged", "Check camera, light and lens"),
    "unlike_training": (
        "its picture is unlike all that the expert learned from",
        "Look at it; train on it if it is right",
    ),
}


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """One expert's answer, as a row of `stages` with its boxes."""

    expert: str
    label: str | None
    confidence: float | None
    boxes: Sequence[Seen] = ()

    def judged(self, step: Step, so_far: Judgement | None, image_size: tuple[int, int] | None) -> Judgement:
        return judge(step, self.label, self.confidence, self.boxes, so_far, image_size)


#: The step of an answer, the answer, and the judgement of the chain so far.
JudgedAnswer = tuple[Step, StoredAnswer, Judgement]


def judge_chain(
    first: Step | None, answers: Sequence[StoredAnswer], image_size: tuple[int, int] | None
) -> tuple[list[JudgedAnswer], Step | None]:
    """Judge the answers up to the first that is not by its step's expert; return the next step too."""
    step, so_far = first, None
    judged: list[JudgedAnswer] = []
    for answer in answers:
        if step is None or step.expert != answer.expert:
            break
        so_far = answer.judged(step, so_far, image_size)
        judged.append((step, answer, so_far))
        step = so_far.next
    return judged, step


def deciding_reasons(
    first: Step | None, answers: Sequence[StoredAnswer], image_size: tuple[int, int] | None
) -> tuple[Judgement, list[str]] | None:
    """Judge the answers again; return the judgement and a sentence for each deciding step (none for a pass).

    None if the answers are not those of a whole chain of these rules.
    """
    judged, step = judge_chain(first, answers, image_size)
    if not judged or len(judged) < len(answers) or step is not None:
        return None
    verdict = judged[-1][2].verdict
    alone = [(step, answer, answer.judged(step, None, image_size)) for step, answer, _ in judged]
    deciding = [part for part in alone if part[2].verdict == verdict != "pass"]
    return judged[-1][2], [f"{part[0].expert} {deciding_reason(*part, image_size)[0]}" for part in deciding]


def _counted(requirement: Requirement, boxes: Sequence[Seen], image_size: tuple[int, int] | None) -> tuple[int, int]:
    """Return how many boxes a requirement counts as sure and as unsure; boxes everywhere if the size is unknown."""
    matching = [box for box in boxes if box.label == requirement.label]
    if requirement.is_placed and image_size is not None:
        matching = [box for box in matching if requirement.holds(box.box, image_size)]
    sure = sum(box.confidence >= requirement.confidence for box in matching)
    return sure, len(matching) - sure


def deciding_reason(
    step: Step, answer: StoredAnswer, alone: Judgement, image_size: tuple[int, int] | None
) -> tuple[str, tuple[str, ...]]:
    """Return what decided a step's judgement `alone`, not a pass, and the keys of its rule that say so."""
    if isinstance(step, ClassifierStep):
        return _of_label(step, answer, alone)
    found = chain(_of_boxes(step, answer.boxes, alone), _of_counts(step, answer.boxes, alone, image_size))
    return next(found, ("decided by its rule", ()))


def _of_label(step: ClassifierStep, answer: StoredAnswer, alone: Judgement) -> tuple[str, tuple[str, ...]]:
    label, confidence = answer.label, answer.confidence
    if label is None:
        return "gave no label", ()
    shown, limit = _percents(confidence, step.review_below)
    if confidence is None or not confidence >= step.review_below:
        return f"was only {shown} sure of '{label}' (limit {limit})", ("review_below",)
    if alone.verdict == "review":
        return f"found '{label}', {shown} sure, and no later step failed it", ("pass",)
    return f"found '{label}', {shown} sure" + (f" (limit {limit})" if step.review_below else ""), ("pass",)


def _of_boxes(step: DetectorStep, boxes: Sequence[Seen], alone: Judgement) -> Iterator[tuple[str, tuple[str, ...]]]:
    by_itself = replace(step, require=(), branches=(), otherwise=None)
    for box in sorted(boxes, key=lambda box: -box.confidence):
        if judge(by_itself, None, None, [box], None).verdict != alone.verdict:
            continue
        fails_from, reviews_from = threshold(step.fail_on, box.label), threshold(step.review_on, box.label)
        if alone.verdict == "review" and fails_from is not None and not box.confidence < fails_from:
            shown, limit = _percents(box.confidence, step.review_below)
            yield f"was only {shown} sure of '{box.label}' (limit {limit})", ("review_below",)
        elif alone.verdict == "review":
            shown, limit = _percents(box.confidence, reviews_from)
            above = "" if fails_from is None else f"; it fails from {_percents(fails_from, box.confidence)[0]}"
            text = f"found '{box.label}', {shown} sure (a person must look from {limit}{above})"
            yield text, ("review_on", box.label)
        else:
            shown, limit = _percents(box.confidence, fails_from)
            yield f"found '{box.label}', {shown} sure (limit {limit})", ("fail_on", box.label)


def _of_counts(
    step: DetectorStep, boxes: Sequence[Seen], alone: Judgement, image_size: tuple[int, int] | None
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a sentence for each requirement that has the verdict by itself."""
    for requirement in step.require:
        only = replace(step, fail_on=(), review_on=(), require=(requirement,), branches=(), otherwise=None)
        if judge(only, None, None, boxes, None, image_size).verdict != alone.verdict:
            continue
        sure, below = _counted(requirement, boxes, image_size)
        unsure = f" and {below} below the limit" if below else ""
        where = " in its place" if requirement.is_placed else ""
        limit = f" (limit {_percents(requirement.confidence, None)[0]})" if requirement.confidence else ""
        text = f"found {sure} '{requirement.label}'{unsure}{where}, expected {_wanted(requirement)}{limit}"
        yield text, ("require", requirement.label)


def _wanted(requirement: Requirement) -> str:
    """Return the count that a requirement expects: `2`, `at least 1`, `1 to 3`."""
    if requirement.maximum is None:
        return f"at least {requirement.minimum}"
    if requirement.minimum == requirement.maximum:
        return f"{requirement.minimum}"
    return f"{requirement.minimum} to {requirement.maximum}"


def _percents(value: float | None, limit: float | None) -> tuple[str, str]:
    """Return both in percent, with enough digits to tell them apart, and from 100 % what is less."""

    def texts(digits: int) -> tuple[str, str]:
        shown, beside = ("–" if one is None else f"{100 * one:.{digits}f} %" for one in (value, limit))
        says_certain = (shown[:3] == "100" and value != 1) or (beside[:3] == "100" and limit != 1)
        is_enough = not says_certain and (shown != beside or value == limit)
        return (shown, beside) if is_enough or digits == 4 else texts(digits + 1)

    return texts(0)
