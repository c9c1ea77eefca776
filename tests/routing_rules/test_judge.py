"""Verdicts of experts' answers: tables of answers and verdicts."""

import math
from dataclasses import dataclass

import pytest

from routing_rules.compile import compile_rules
from routing_rules.routes import (
    ClassifierStep,
    DetectorStep,
    Judgement,
    Step,
    VerdictName,
    judge,
    next_steps,
    taught_label,
)

RULES = """
boards: {b: {components: {QFP: 1, SOT: 1, ELCO: 1}}}
classifiers:
  QFP: {expert: qfp, pass: [ok, turned], review_below: 0.90, then: solder}
  SOT: {expert: sot, pass: [clean], review_below: 0.80, then: {suspect: solder}, on_clear: pass}
  "*": {expert: any, pass: [ok], review_below: 0.80, then: {tilted: solder, swollen: null, "*": kind}}
detectors:
  solder:
    expert: yolo
    fail_on: {bridge: 0.40, void: 0.55}
    review_on: {bridge: 0.25, smear: 0.50}
    review_below: 0.45
    then: {contamination: kind}
steps:
  kind: {expert: kind, pass: [harmless], review_below: 0.60}
defects: {tombstone: D101, bridge: D207, tilted: D300}
"""


@dataclass(frozen=True)
class Seen:
    label: str
    confidence: float
    box: tuple[float, float, float, float] = (0.0, 0.0, 2.0, 2.0)


def a_step(component: str) -> Step:
    step = compile_rules(RULES).first_step("b", component)
    assert step is not None
    return step


def a_detector(require: str) -> DetectorStep:
    """The detector of rules with these requirements, behind which other keys may stand."""
    text = "boards: {b: {components: {R: 1}}}\nclassifiers: {R: {expert: r, pass: [ok], then: d}}\n"
    codes = "defects: {missing_joint: D9}\n"
    first = compile_rules(f"{text}detectors: {{d: {{expert: yolo, require: {require}}}}}\n{codes}").first_step("b", "R")
    assert isinstance(first, ClassifierStep)
    step = first.goes_to("ok")
    assert isinstance(step, DetectorStep)
    return step


def outcome(judgement: Judgement) -> tuple[VerdictName, str | None, str | None]:
    return judgement.verdict, judgement.defect, judgement.next and judgement.next.name


@pytest.mark.parametrize(
    ("component", "label", "confidence", "expected"),
    [
        ("QFP", "ok", 0.95, ("pass", None, "solder")),
        ("QFP", "ok", 0.89, ("review", None, "solder")),
        ("QFP", "tombstone", 0.95, ("fail", "D101", None)),
        ("QFP", "missing", 0.95, ("fail", "missing", None)),
        ("QFP", "missing", 0.89, ("review", "missing", None)),
        ("QFP", None, None, ("review", None, None)),
        ("QFP", "ok", math.nan, ("review", None, "solder")),
        ("QFP", "missing", math.nan, ("review", "missing", None)),
        ("SOT", "suspect", 0.90, ("pass", None, "solder")),
        ("SOT", "suspect", 0.70, ("review", "suspect", "solder")),
        ("ELCO", "ok", 0.90, ("pass", None, "kind")),
        ("ELCO", "tilted", 0.90, ("review", "D300", "solder")),
        ("ELCO", "swollen", 0.90, ("fail", "swollen", None)),
        ("ELCO", "anything", 0.90, ("review", "anything", "kind")),
    ],
)
def test_a_classifiers_answer_becomes_its_verdict(
    component: str, label: str | None, confidence: float | None, expected: tuple[str, str | None, str | None]
) -> None:
    assert outcome(judge(a_step(component), label, confidence, (), None)) == expected


SOLDER = next_steps(a_step("QFP"))[0]


def joints(*confidences: float) -> list[Seen]:
    return [Seen("joint", confidence) for confidence in confidences]


def a_mark(*box: float) -> list[Seen]:
    return [Seen("mark", 0.9, (box[0], box[1], box[2], box[3]))]


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([], ("pass", None, None)),
        ([Seen("bridge", 0.24)], ("pass", None, None)),
        ([Seen("bridge", 0.25)], ("review", "D207", None)),
        ([Seen("bridge", 0.45)], ("fail", "D207", None)),
        ([Seen("smear", 0.50)], ("review", "smear", None)),
        ([Seen("smear", 0.49)], ("pass", None, None)),
        ([Seen("bridge", 0.60), Seen("void", 0.70)], ("fail", "void", None)),
        ([Seen("void", 0.60), Seen("bridge", 0.70)], ("fail", "D207", None)),
        ([Seen("smear", 0.99), Seen("void", 0.60)], ("fail", "void", None)),
        ([Seen("void", math.nan)], ("review", "void", None)),
        ([Seen("contamination", 0.30)], ("pass", None, "kind")),
        ([Seen("contamination", 0.30), Seen("smear", 0.60)], ("review", "smear", "kind")),
        ([Seen("contamination", 0.30), Seen("void", 0.60)], ("fail", "void", None)),
    ],
)
def test_a_detectors_answer_becomes_its_verdict(
    boxes: list[Seen], expected: tuple[str, str | None, str | None]
) -> None:
    assert outcome(judge(SOLDER, None, None, boxes, None)) == expected


LEFT_HALF = "{mark: {min: 1, region: [0, 0, 0.5, 1]}}"
CORNER = "{mark: {min: 1, position: {at: [0.1, 0.2], tolerance: 0.05}}}"
BOTH_HALVES = "{mark: [{min: 1, region: [0, 0, 0.5, 1]}, {min: 1, region: [0.5, 0, 1, 1]}]}"
NOT_LEFT = "{mark: {max: 0, region: [0, 0, 0.5, 1]}}"
#: Requirements by subject: the keys of the detector, the boxes it saw, and the verdict.
REQUIREMENTS = {
    "a count": [
        ("{joint: {min: 2}}", joints(0.3, 0.3), ("pass", None)),
        ("{joint: {min: 2}}", joints(0.3), ("fail", "D9")),
        ("{joint: {}}", [], ("fail", "D9")),
        ("{mark: {}}", [], ("fail", "missing_mark")),
        ("{joint: {max: 1}}", [], ("pass", None)),
        ("{joint: {max: 1}}", joints(0.3, 0.3), ("fail", "extra_joint")),
        ("{joint: {max: 0}}", joints(0.3), ("fail", "extra_joint")),
        ("{joint: {min: 1, max: 2}}", joints(0.3, 0.3), ("pass", None)),
        ("{joint: {min: 1, max: 2}}", joints(0.3, 0.3, 0.3), ("fail", "extra_joint")),
    ],
    "a count of sure boxes": [
        ("{joint: {min: 2, confidence: 0.5}}", joints(0.5, 0.5), ("pass", None)),
        ("{joint: {min: 2, confidence: 0.5}}", joints(0.5, 0.4), ("review", "D9")),
        ("{joint: {min: 2, confidence: 0.5}}", joints(0.4), ("fail", "D9")),
        ("{joint: {max: 1, confidence: 0.5}}", joints(0.9, 0.4), ("review", "extra_joint")),
        ("{joint: {max: 1, confidence: 0.5}}", joints(0.9, 0.9), ("fail", "extra_joint")),
        ("{joint: {min: 1, max: 1, confidence: 0.5}}", joints(0.9), ("pass", None)),
        ("{joint: {min: 1}}", joints(math.nan), ("review", "D9")),
        # `review_below` is the confidence of a requirement that names none.
        ("{joint: {}, mark: {confidence: 0.2}}, review_below: 0.6", [*joints(0.6), Seen("mark", 0.2)], ("pass", None)),
        ("{joint: {}, mark: {confidence: 0.2}}, review_below: 0.6", [*joints(0.5), Seen("mark", 0.2)],
         ("review", "D9")),
    ],
    "a place, where the centre of the box counts": [
        (LEFT_HALF, a_mark(80, 0, 120, 10), ("pass", None)),
        (LEFT_HALF, a_mark(82, 0, 120, 10), ("fail", "misplaced_mark")),
        (LEFT_HALF, [], ("fail", "missing_mark")),
        (CORNER, a_mark(15, 15, 25, 25), ("pass", None)),
        (CORNER, a_mark(26, 15, 36, 25), ("fail", "misplaced_mark")),
        (CORNER, a_mark(15, 26, 25, 36), ("fail", "misplaced_mark")),
        (NOT_LEFT, a_mark(160, 0, 180, 10), ("pass", None)),
        (NOT_LEFT, a_mark(0, 0, 10, 10), ("fail", "extra_mark")),
        (BOTH_HALVES, a_mark(0, 0, 10, 10) + a_mark(160, 0, 180, 10), ("pass", None)),
        (BOTH_HALVES, a_mark(0, 0, 10, 10) * 2, ("fail", "misplaced_mark")),
    ],
    "labels that fail, of which a star is every one that is not named": [
        ('{}, fail_on: {crack: 0.9, "*": 0.5}', [Seen("crack", 0.6)], ("pass", None)),
        ('{}, fail_on: {crack: 0.9, "*": 0.5}', [Seen("dent", 0.6)], ("fail", "dent")),
        ('{}, fail_on: {crack: 0.9, "*": 0.5}', [Seen("dent", 0.4)], ("pass", None)),
        # A defect that was seen is named before a part that is missing.
        ("{joint: {min: 1}}, fail_on: {crack: 0.5}", [Seen("crack", 0.6)], ("fail", "crack")),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("require", "boxes", "expected"),
    [
        pytest.param(*row, id=f"{kind} {number}")
        for kind, rows in REQUIREMENTS.items()
        for number, row in enumerate(rows)
    ],
)
def test_requirements_are_met_or_not(require: str, boxes: list[Seen], expected: tuple[str, str | None]) -> None:
    judgement = judge(a_detector(require), None, None, boxes, None, (200, 100))
    assert (judgement.verdict, judgement.defect) == expected


def test_without_the_images_size_nothing_that_must_lie_somewhere_passes() -> None:
    step = a_detector(LEFT_HALF)
    assert outcome(judge(step, None, None, [Seen("mark", 0.9)], None)) == ("review", "missing_mark", None)
    assert outcome(judge(step, None, None, [], None)) == ("fail", "missing_mark", None)


def test_a_detector_may_go_on_by_one_name_or_by_label() -> None:
    onward = next_steps(SOLDER)[0]
    plain = DetectorStep("d", "yolo", fail_on=(("crack", 0.5),), otherwise=onward)
    assert judge(plain, None, None, [], None).next is onward
    assert judge(plain, None, None, [Seen("crack", 0.9)], None).next is None


def test_the_surest_box_with_a_named_label_picks_the_branch() -> None:
    first, second = (ClassifierStep(name, name, ("ok",)) for name in ("one", "two"))
    step = DetectorStep("d", "yolo", branches=(("a", first), ("b", second)))
    assert judge(step, None, None, [Seen("x", 0.9), Seen("a", 0.3), Seen("b", 0.4)], None).next is second
    assert judge(step, None, None, [Seen("x", 0.9)], None).next is None


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (("pass", None), [], ("pass", None)),
        (("review", None), [], ("review", None)),
        (("review", "suspect"), [], ("review", "suspect")),
        (("review", "suspect"), [Seen("smear", 0.9)], ("review", "smear")),
        (("review", "suspect"), [Seen("void", 0.9)], ("fail", "void")),
        (("pass", None), [Seen("smear", 0.9)], ("review", "smear")),
        (("unknown", None), [Seen("smear", 0.9)], ("unknown", None)),
        (("unknown", None), [Seen("void", 0.9)], ("fail", "void")),
    ],
)
def test_the_worst_verdict_of_a_chain_wins(
    before: tuple[VerdictName, str | None], after: list[Seen], expected: tuple[str, str | None]
) -> None:
    judgement = judge(SOLDER, None, None, after, Judgement(before[0], before[1], SOLDER))
    assert (judgement.verdict, judgement.defect) == expected


@pytest.mark.parametrize(
    ("component", "label", "boxes", "expected"),
    [
        ("ELCO", "tilted", [], ("review", "D300", None)),
        ("SOT", "suspect", [], ("pass", None, None)),  # `on_clear: pass`
        ("SOT", "suspect", [Seen("void", 0.9)], ("fail", "void", None)),
    ],
)
def test_a_handed_on_image_is_reviewed_or_passes_as_the_rules_say(
    component: str, label: str, boxes: list[Seen], expected: tuple[str, str | None, str | None]
) -> None:
    first = judge(a_step(component), label, 0.99, (), None)
    assert first.next is not None
    assert outcome(judge(first.next, None, None, boxes, first)) == expected


def test_a_chain_of_three_steps_ends_with_its_worst_verdict() -> None:
    first = judge(a_step("QFP"), "ok", 0.5, (), None)
    assert outcome(first) == ("review", None, "solder")
    assert first.next is not None
    second = judge(first.next, None, None, [Seen("contamination", 0.9)], first)
    assert outcome(second) == ("review", None, "kind")
    assert second.next is not None
    assert outcome(judge(second.next, "harmless", 0.9, (), second)) == ("review", None, None)
    assert outcome(judge(second.next, "harmful", 0.9, (), second)) == ("fail", "harmful", None)


def test_nothing_goes_on_from_a_failure() -> None:
    failed = Judgement("fail", "x", None)
    judgement = judge(a_step("QFP"), "ok", 0.99, (), failed)
    assert outcome(judgement) == ("fail", "x", None)


# The label that a decision teaches

ENDS = ClassifierStep("c", "R0402", ("ok", "rework"), codes={"tombstone": "D7"})
GOES_ON = ClassifierStep("c", "R0402", ("ok",), otherwise=DetectorStep("d", "solder"), codes={"tombstone": "D7"})
LABELS = ("ok", "rework", "tombstone", "shift")


@pytest.mark.parametrize(
    ("step", "answered", "verdict", "defect", "label"),
    [
        (ENDS, "ok", "pass", None, "ok"),
        (ENDS, "rework", "pass", None, "rework"),
        (ENDS, "shift", "pass", None, "ok"),
        (ENDS, "ok", "fail", "D7", "tombstone"),
        (ENDS, "ok", "fail", "shift", "shift"),
        (ENDS, "ok", "fail", "crack", "crack"),
        (ENDS, "shift", "fail", None, None),
        (ENDS, "shift", "unknown", None, None),
        (GOES_ON, "ok", "fail", "D7", "tombstone"),
        (GOES_ON, "ok", "fail", "bridge", None),
        (GOES_ON, "shift", "pass", None, "ok"),
    ],
)
def test_a_decision_gives_the_label_that_it_proves_and_no_other(
    step: ClassifierStep, answered: str, verdict: str, defect: str | None, label: str | None
) -> None:
    assert taught_label(step, LABELS, answered, verdict, defect) == label


def test_a_fail_without_a_defect_is_the_only_label_that_fails() -> None:
    assert taught_label(ENDS, ("ok", "bad"), "ok", "fail", None) == "bad"
    assert taught_label(GOES_ON, ("ok", "bad"), "ok", "fail", None) is None


def test_of_labels_with_the_same_code_only_the_answered_one_is_proved() -> None:
    step = ClassifierStep("c", "R0402", ("ok",), codes={"bridge": "D2", "short": "D2"})
    labels = ("ok", "bridge", "short")
    assert taught_label(step, labels, "short", "fail", "D2") == "short"
    assert taught_label(step, labels, "ok", "fail", "D2") is None
