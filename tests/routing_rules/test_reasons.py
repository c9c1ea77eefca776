"""The sentence that tells why an image has its verdict: the deciding step, and its limit."""

from dataclasses import dataclass

import pytest

from routing_rules.compile import compile_rules
from routing_rules.reasons import StoredAnswer, deciding_reasons

RULES = """
boards: {b: {components: {LED0805: 1, R0402: 1, QFP64: 1}}}
classifiers:
  LED0805: {expert: LED0805, pass: [ok], review_below: 0.88, then: solder}
  R0402: {expert: R0402, pass: [ok], review_below: 0.6, then: {tombstone: null, "*": solder}}
  QFP64: {expert: QFP64, pass: [ok], review_below: 0.0, then: leads}
detectors:
  solder: {expert: solder, fail_on: {bridge: 0.5}, review_on: {"*": 0.3}, review_below: 0.55}
  leads: {expert: leads, require: {lead: {min: 2, confidence: 0.7}}}
defects: {bridge: D207}
"""
SURE = ("ok", 0.99)


@dataclass(frozen=True)
class Box:
    label: str
    confidence: float
    box: tuple[float, float, float, float] = (0, 0, 9, 9)


def reasons(component: str, first: tuple[str | None, float | None], *boxes: Box) -> tuple[str, list[str]]:
    routes = compile_rules(RULES)
    step = routes.first_step("b", component)
    assert step is not None
    answers = [StoredAnswer(step.expert, *first)]
    if boxes or first[0] == "ok":
        detector = "leads" if component == "QFP64" else "solder"
        answers.append(StoredAnswer(detector, None, None, boxes))
    decided = deciding_reasons(step, answers, (10, 10))
    assert decided is not None
    return decided[0].verdict, decided[1]


@pytest.mark.parametrize(
    ("component", "first", "boxes", "verdict", "sentences"),
    [
        ("LED0805", ("ok", 0.82), (), "review", ["LED0805 was only 82 % sure of 'ok' (limit 88 %)"]),
        ("LED0805", SURE, (), "pass", []),
        ("LED0805", ("ok", 0.82), (Box("bridge", 0.9),), "fail", ["solder found 'bridge', 90 % sure (limit 50 %)"]),
        ("LED0805", SURE, (Box("bridge", 0.52),), "review", ["solder was only 52 % sure of 'bridge' (limit 55 %)"]),
        (
            *("LED0805", SURE, (Box("bridge", 0.4),), "review"),
            ["solder found 'bridge', 40 % sure (a person must look from 30 %; it fails from 50 %)"],
        ),
        ("R0402", ("tombstone", 0.95), (), "fail", ["R0402 found 'tombstone', 95 % sure (limit 60 %)"]),
        ("R0402", ("tombstone", 0.9989), (), "fail", ["R0402 found 'tombstone', 99.9 % sure (limit 60.0 %)"]),
        (
            "R0402",
            ("odd", 0.95),
            (Box("x", 0.1),),
            "review",
            ["R0402 found 'odd', 95 % sure, and no later step failed it"],
        ),
        (
            *("QFP64", SURE, (Box("lead", 0.9), Box("lead", 0.5)), "review"),
            ["leads found 1 'lead' and 1 below the limit, expected at least 2 (limit 70 %)"],
        ),
        ("QFP64", SURE, (Box("lead", 0.9),), "fail", ["leads found 1 'lead', expected at least 2 (limit 70 %)"]),
        (
            *("LED0805", ("ok", 0.8), (Box("bridge", 0.4),), "review"),
            [
                "LED0805 was only 80 % sure of 'ok' (limit 88 %)",
                "solder found 'bridge', 40 % sure (a person must look from 30 %; it fails from 50 %)",
            ],
        ),
    ],
)
def test_the_deciding_step_is_told_with_its_limit(
    component: str,
    first: tuple[str, float],
    boxes: tuple[Box, ...],
    verdict: str,
    sentences: list[str],
) -> None:
    assert reasons(component, first, *boxes) == (verdict, sentences)


def test_an_answer_without_a_label_is_no_certainty() -> None:
    step = compile_rules(RULES).first_step("b", "R0402")
    decided = deciding_reasons(step, [StoredAnswer("R0402", None, None)], None)
    assert decided is not None
    assert decided[1] == ["R0402 gave no label"]


def test_answers_of_another_chain_or_of_half_a_chain_have_no_reason() -> None:
    step = compile_rules(RULES).first_step("b", "LED0805")
    assert deciding_reasons(step, [StoredAnswer("R0402", "ok", 0.9)], None) is None
    assert deciding_reasons(step, [StoredAnswer("LED0805", "ok", 0.9)], None) is None
    assert deciding_reasons(None, [], None) is None
