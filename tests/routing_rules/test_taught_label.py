"""The label that a person's decision gives a picture at one step of a chain."""

import pytest

from routing_rules.routes import ClassifierStep, DetectorStep, taught_label

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
