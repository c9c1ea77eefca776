"""Answers in shadow in the database, and their comparison with the version in force and with reviewers."""

from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from daemon.shadow.comparison import add_answers, outcome_text, shadow_report
from experts.editions.candidates import Shadow
from experts.spec import digest_of
from routing_rules.routes import ClassifierStep, Judgement
from tests.daemon.storage.database.store_parts import SETTINGS, Line, a_line, a_stage, a_verdict, an_image

IN_FORCE = ("0123456789ab", digest_of(SETTINGS))
SHADOW = Shadow(version="feedfeedfeed", images=4, agreement=0.3)


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return a_line(tmp_path)


def judged(line: Line, *verdicts: str, version: str = IN_FORCE[0]) -> list[int]:
    """Images of one board, with these verdicts by expert r50."""
    ids: list[int] = []
    for verdict in verdicts:
        line.images += 1
        (image,) = line.accept(an_image(f"i{line.images}", type="loose", serial="L"))
        stages = (a_stage(expert_version=version), a_stage("yolo", label=None))
        line.judge(a_verdict(image, verdict, stages=stages))  # pyright: ignore[reportArgumentType]
        ids.append(image.inspection_id)
    return ids


def answer(inspection_id: int, in_service: str, outcome: str, version: str = SHADOW.version) -> dict[str, Any]:
    row = {"inspection_id": inspection_id, "expert": "r50", "expert_version": version, "step": 0, "label": "ok"}
    return row | {"confidence": 0.9, "infer_ms": 1.0, "outcome_in_service": in_service, "outcome": outcome}


def report(line: Line, shadow: Shadow = SHADOW) -> dict[str, Any]:
    with line.store.engine.connect() as connection:
        return shadow_report(lambda query: connection.execute(query).all(), "r50", IN_FORCE, shadow)


def test_outcomes_are_told_apart_by_verdict_defect_and_next_step():
    step = ClassifierStep("solder", "yolo", ("ok",))
    assert outcome_text(Judgement("pass", None, None)) == "pass"
    assert outcome_text(Judgement("fail", "D101", None)) == "fail D101"
    assert outcome_text(Judgement("review", "D101", None)) == "review"
    assert outcome_text(Judgement("pass", None, step)) == "next solder"
    assert outcome_text(Judgement("review", "D101", step)) == "review, next solder"


def test_an_answer_is_added_once_and_none_for_an_image_that_is_gone(line: Line):
    (image,) = judged(line, "pass")
    rows = [answer(image, "pass", "pass"), answer(image, "pass", "fail D1"), answer(999, "pass", "pass")]
    line.store.transact(add_answers, rows)
    line.store.transact(add_answers, [answer(image, "pass", "review")])
    line.store.transact(add_answers, [answer(image, "pass", "pass", "0" * 12)])
    assert line.rows("SELECT inspection_id, expert_version, outcome FROM shadow_answers ORDER BY 2") == [
        (image, "0" * 12, "pass"),
        (image, SHADOW.version, "fail D1"),
    ]


def test_the_comparison_is_with_the_version_in_force_alone_and_counts_what_was_left_out(line: Line):
    judged(line, "pass")  # before the shadow's first
    old = judged(line, "pass", version="0" * 12)
    same, other, left_out = judged(line, "pass", "fail", "pass")
    pairs = [(same, "pass", "pass"), (other, "fail D1", "pass"), (old[0], "pass", "fail D1")]
    line.store.transact(add_answers, [answer(*each) for each in pairs])
    told = report(line)
    assert (told["images"], told["eligible"], told["agreement"]) == (2, 3, 0.5)
    interval = binomtest(1, 2).proportion_ci(0.95, method="exact")
    assert (told["low"], told["high"]) == pytest.approx((interval.low, interval.high))
    board = line.rows("SELECT board_id FROM inspections WHERE inspection_id = ?", other)[0][0]
    assert told["outcomes"][0] == {
        "in_service": "fail D1", "shadow": "pass", "images": 1, "examples": [(other, board)],
    }  # fmt: skip
    assert told["sentence"] == (
        "does not hold yet: 2 of 4 images, agreement at least 0.0126 (0.3 is asked);"
        " missing: 2 more images, agreement of at least 0.3"
    )
    assert left_out


def test_it_holds_when_both_images_and_the_interval_are_reached(line: Line):
    ids = judged(line, *["pass"] * 4)
    line.store.transact(add_answers, [answer(image, "pass", "pass") for image in ids])
    told = report(line)
    low = binomtest(4, 4).proportion_ci(0.95, method="exact").low
    assert (told["holds"], told["high"]) == (True, 1.0)
    assert told["low"] == pytest.approx(low)
    assert told["sentence"] == f"holds: 4 of 4 images, agreement at least {low:.4f} (0.3 is asked)"
    assert not report(line, SHADOW.model_copy(update={"agreement": 0.9}))["holds"]
    assert not report(line, SHADOW.model_copy(update={"images": 5}))["holds"]


def test_without_answers_nothing_holds(line: Line):
    judged(line, "pass")
    told = report(line)
    assert (told["images"], told["eligible"], told["agreement"], told["holds"]) == (0, 0, None, False)


def test_changes_count_against_the_newest_decisions_of_people_where_the_new_verdict_is_known(line: Line):
    cases = [
        ("fail", "fail D1", "pass", "pass", "false_calls_gone"),
        ("pass", "pass", "fail D1", "fail", "escapes_caught"),
        ("pass", "next solder", "fail D1", "pass", "new_false_calls"),
        ("fail", "fail D1", "pass", "fail", "new_escapes"),
        ("fail", "fail D1", "next solder", "pass", None),
        ("fail", "fail D1", "fail D1", "pass", None),
    ]
    ids = judged(line, *(verdict for verdict, *_ in cases))
    rows = [answer(image, old, new) for image, (_, old, new, _, _) in zip(ids, cases, strict=True)]
    line.store.transact(add_answers, rows)
    for image, (_, _, _, final, _) in zip(ids, cases, strict=True):
        line.review(image, "review")
        line.review(image, final)  # pyright: ignore[reportArgumentType]
    told = report(line)
    assert (told["images"], told["reviewed"]) == (6, 6)
    assert told["effects"] == {effect: 1 for *_, effect in cases if effect}
