"""What an expert's answer means: tables of answers and verdicts."""

import math
from dataclasses import dataclass

import pytest

from routing_rules.compile import compile_rules
from routing_rules.routes import ClassifierStep, DetectorStep, Judgement, Step, Verdict, judge, worst

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


def a_detector(**changes: str) -> DetectorStep:
    """The detector of rules with the given keys."""
    keys = ", ".join(f"{key}: {value}" for key, value in changes.items())
    text = "boards: {b: {components: {R: 1}}}\nclassifiers: {R: {expert: r, pass: [ok], then: d}}\n"
    codes = "defects: {missing_joint: D9}\n"
    first = compile_rules(f"{text}detectors: {{d: {{expert: yolo, {keys}}}}}\n{codes}").first_step("b", "R")
    assert isinstance(first, ClassifierStep)
    step = first.goes_to("ok")
    assert isinstance(step, DetectorStep)
    return step


def found(step: Step, *seen: Seen, size: tuple[int, int] | None = (100, 100)) -> tuple[Verdict, str | None]:
    judgement = judge(step, None, None, seen, None, size)
    return judgement.verdict, judgement.defect


def outcome(judgement: Judgement) -> tuple[Verdict, str | None, str | None]:
    return judgement.verdict, judgement.defect, judgement.next and judgement.next.name


@pytest.mark.parametrize(
    ("component", "label", "confidence", "expected"),
    [
        ("QFP", "ok", 0.95, ("pass", None, "solder")),
        ("QFP", "turned", 0.90, ("pass", None, "solder")),
        ("QFP", "ok", 0.89, ("review", None, "solder")),
        ("QFP", "tombstone", 0.95, ("fail", "D101", None)),
        ("QFP", "missing", 0.95, ("fail", "missing", None)),
        ("QFP", "missing", 0.89, ("review", "missing", None)),
        ("QFP", None, None, ("review", None, None)),
        ("QFP", "ok", math.nan, ("review", None, "solder")),
        ("QFP", "ok", None, ("review", None, "solder")),
        ("QFP", "missing", math.nan, ("review", "missing", None)),
        ("SOT", "clean", 0.90, ("pass", None, None)),
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


SOLDER = a_step("QFP").next_steps()[0]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([], ("pass", None, None)),
        ([Seen("joint", 0.9)], ("pass", None, None)),
        ([Seen("bridge", 0.24)], ("pass", None, None)),
        ([Seen("bridge", 0.25)], ("review", "D207", None)),
        ([Seen("bridge", 0.40)], ("review", "D207", None)),
        ([Seen("bridge", 0.45)], ("fail", "D207", None)),
        ([Seen("smear", 0.50)], ("review", "smear", None)),
        ([Seen("smear", 0.49)], ("pass", None, None)),
        ([Seen("bridge", 0.60), Seen("void", 0.70)], ("fail", "void", None)),
        ([Seen("void", 0.60), Seen("bridge", 0.70)], ("fail", "D207", None)),
        ([Seen("smear", 0.99), Seen("void", 0.60)], ("fail", "void", None)),
        ([Seen("smear", 0.99), Seen("void", 0.50)], ("review", "smear", None)),
        ([Seen("void", math.nan)], ("review", "void", None)),
        ([Seen("contamination", 0.30)], ("pass", None, "kind")),
        ([Seen("contamination", 0.30), Seen("smear", 0.60)], ("review", "smear", "kind")),
        ([Seen("contamination", 0.30), Seen("void", 0.60)], ("fail", "void", None)),
    ],
)
def test_a_detectors_answer_becomes_its_verdict(seen: list[Seen], expected: tuple[str, str | None, str | None]) -> None:
    assert outcome(judge(SOLDER, None, None, seen, None)) == expected


@pytest.mark.parametrize(
    ("require", "seen", "expected"),
    [
        ("{joint: {min: 2}}", [Seen("joint", 0.3)] * 2, ("pass", None)),
        ("{joint: {min: 2}}", [Seen("joint", 0.3)] * 9, ("pass", None)),
        ("{joint: {min: 2}}", [Seen("joint", 0.3)], ("fail", "D9")),
        ("{joint: {}}", [], ("fail", "D9")),
        ("{joint: {}}", [Seen("joint", 0.3)], ("pass", None)),
        ("{mark: {}}", [], ("fail", "missing_mark")),
        ("{joint: {max: 1}}", [], ("pass", None)),
        ("{joint: {max: 1}}", [Seen("joint", 0.3)] * 2, ("fail", "extra_joint")),
        ("{joint: {max: 0}}", [Seen("joint", 0.3)], ("fail", "extra_joint")),
        ("{joint: {min: 1, max: 2}}", [Seen("joint", 0.3)] * 2, ("pass", None)),
        ("{joint: {min: 1, max: 2}}", [Seen("joint", 0.3)] * 3, ("fail", "extra_joint")),
        ("{joint: {min: 2, confidence: 0.5}}", [Seen("joint", 0.5)] * 2, ("pass", None)),
        ("{joint: {min: 2, confidence: 0.5}}", [Seen("joint", 0.5), Seen("joint", 0.4)], ("review", "D9")),
        ("{joint: {min: 2, confidence: 0.5}}", [Seen("joint", 0.4)] * 2, ("review", "D9")),
        ("{joint: {min: 2, confidence: 0.5}}", [Seen("joint", 0.4)], ("fail", "D9")),
        ("{joint: {max: 1, confidence: 0.5}}", [Seen("joint", 0.9), Seen("joint", 0.4)], ("review", "extra_joint")),
        ("{joint: {max: 1, confidence: 0.5}}", [Seen("joint", 0.9)] * 2, ("fail", "extra_joint")),
        ("{joint: {min: 1, max: 1, confidence: 0.5}}", [Seen("joint", 0.9)], ("pass", None)),
        ("{joint: {min: 1}}", [Seen("joint", math.nan)], ("review", "D9")),
    ],
)
def test_a_required_count_is_met_or_not(require: str, seen: list[Seen], expected: tuple[str, str | None]) -> None:
    assert found(a_detector(require=require), *seen) == expected


def test_review_below_is_the_confidence_of_requirements_that_name_none() -> None:
    step = a_detector(require="{joint: {min: 1}, mark: {min: 1, confidence: 0.2}}", review_below="0.6")
    assert found(step, Seen("joint", 0.6), Seen("mark", 0.2)) == ("pass", None)
    assert found(step, Seen("joint", 0.5), Seen("mark", 0.2)) == ("review", "D9")


LEFT_HALF = "{mark: {min: 1, region: [0, 0, 0.5, 1]}}"
CORNER = "{mark: {min: 1, position: {at: [0.1, 0.2], tolerance: 0.05}}}"


@pytest.mark.parametrize(
    ("require", "box", "expected"),
    [
        (LEFT_HALF, (40, 0, 60, 10), ("pass", None)),
        (LEFT_HALF, (41, 0, 60, 10), ("fail", "misplaced_mark")),
        (CORNER, (15, 15, 25, 25), ("pass", None)),
        (CORNER, (25, 15, 35, 25), ("pass", None)),
        (CORNER, (26, 15, 36, 25), ("fail", "misplaced_mark")),
        (CORNER, (15, 25, 25, 35), ("pass", None)),
        (CORNER, (15, 26, 25, 36), ("fail", "misplaced_mark")),
    ],
)
def test_a_box_is_where_its_centre_is(
    require: str, box: tuple[float, float, float, float], expected: tuple[str, str | None]
) -> None:
    size = (200, 100) if require == CORNER else (100, 100)
    assert found(a_detector(require=require), Seen("mark", 0.9, box), size=size) == expected


def test_a_box_that_is_nowhere_is_missing_not_misplaced() -> None:
    assert found(a_detector(require=LEFT_HALF)) == ("fail", "missing_mark")


def test_what_must_not_be_in_a_region_may_be_elsewhere() -> None:
    step = a_detector(require="{ball: {max: 0, region: [0, 0, 0.5, 1]}}")
    assert found(step, Seen("ball", 0.9, (80, 0, 90, 10))) == ("pass", None)
    assert found(step, Seen("ball", 0.9, (0, 0, 10, 10))) == ("fail", "extra_ball")


def test_without_the_images_size_nothing_that_must_lie_somewhere_passes() -> None:
    step = a_detector(require=LEFT_HALF)
    assert found(step, Seen("mark", 0.9), size=None) == ("review", "missing_mark")
    assert found(step, size=None) == ("fail", "missing_mark")


def test_several_requirements_of_one_label_all_count() -> None:
    step = a_detector(require="{mark: [{min: 1, region: [0, 0, 0.5, 1]}, {min: 1, region: [0.5, 0, 1, 1]}]}")
    left, right = Seen("mark", 0.9, (0, 0, 10, 10)), Seen("mark", 0.9, (80, 0, 90, 10))
    assert found(step, left, right) == ("pass", None)
    assert found(step, left, left) == ("fail", "misplaced_mark")


def test_a_star_is_every_label_that_is_not_named() -> None:
    step = a_detector(fail_on='{crack: 0.9, "*": 0.5}')
    assert found(step, Seen("crack", 0.6)) == ("pass", None)
    assert found(step, Seen("dent", 0.6)) == ("fail", "dent")
    assert found(step, Seen("dent", 0.4)) == ("pass", None)


def test_a_found_defect_is_named_before_a_missing_part() -> None:
    step = a_detector(fail_on="{crack: 0.5}", require="{joint: {min: 1}}")
    assert found(step, Seen("crack", 0.6)) == ("fail", "crack")


def test_a_detector_may_go_on_by_one_name_or_by_label() -> None:
    onward = SOLDER.next_steps()[0]
    plain = DetectorStep("d", "yolo", fail_on=(("crack", 0.5),), otherwise=onward)
    assert judge(plain, None, None, [], None).next is onward
    assert judge(plain, None, None, [Seen("crack", 0.9)], None).next is None


def test_the_surest_box_with_a_named_label_picks_the_branch() -> None:
    one, two = (ClassifierStep(name, name, ("ok",)) for name in ("one", "two"))
    step = DetectorStep("d", "yolo", branches=(("a", one), ("b", two)))
    assert judge(step, None, None, [Seen("x", 0.9), Seen("a", 0.3), Seen("b", 0.4)], None).next is two
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
    before: tuple[Verdict, str | None], after: list[Seen], expected: tuple[str, str | None]
) -> None:
    judgement = judge(SOLDER, None, None, after, Judgement(before[0], before[1], SOLDER))
    assert (judgement.verdict, judgement.defect) == expected


def test_a_handed_on_image_is_reviewed_where_nothing_is_found_behind_it() -> None:
    first = judge(a_step("ELCO"), "tilted", 0.99, (), None)
    assert first.next is not None
    assert outcome(judge(first.next, None, None, [], first)) == ("review", "D300", None)


def test_a_handed_on_image_passes_where_the_rules_say_so() -> None:
    first = judge(a_step("SOT"), "suspect", 0.99, (), None)
    assert first.next is not None
    assert outcome(judge(first.next, None, None, [], first)) == ("pass", None, None)
    assert outcome(judge(first.next, None, None, [Seen("void", 0.9)], first)) == ("fail", "void", None)


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


def test_the_order_of_verdicts_is_that_of_boards() -> None:
    assert worst(["pass", "review", "unknown", "fail"]) == "fail"
    assert worst(["pass", "review", "unknown"]) == "unknown"
    assert worst(["pass", "review"]) == "review"
    assert worst(["pass"]) == "pass"
