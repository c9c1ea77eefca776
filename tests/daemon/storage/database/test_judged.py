"""Outcomes of each expert version's answers, from a database as the daemon writes it."""

import pytest

from daemon.storage.database import reviews
from daemon.storage.database.connections import open_for_reading
from daemon.storage.database.reviews import (
    ExpertCalls,
    answered_settings,
    calls_by_version,
    calls_statement,
    recent_confidences,
)
from experts.spec import digest_of
from tests.daemon.storage.database.store_parts import SETTINGS, Line, a_stage, a_verdict, an_image

OLD, NEW = "0" * 12, "1" * 12
USUAL = digest_of(SETTINGS)


def judged(
    line: Line,
    verdict,
    *stages: tuple[str, str],
    label: str = "ok",
    confidence: float | None = 0.97,
    picture: bytes | None = None,
    settings: str = SETTINGS,
) -> int:
    """One image that went through `stages` (expert, version)."""
    line.images += 1
    payload = picture or f"picture {line.images}".encode()
    (image,) = line.accept(an_image(f"image-{line.images}", type="loose", serial=f"S{line.images}", payload=payload))
    answers = [
        a_stage(
            expert,
            expert_version=version,
            label=label,
            confidence=confidence,
            settings=settings,
            expert_settings=digest_of(settings),
        )
        for expert, version in stages
    ]
    line.judge(a_verdict(image, verdict, stages=answers))
    return image.inspection_id


def ask(line: Line, question, *arguments):
    engine = open_for_reading(line.url)
    try:
        with engine.connect() as connection:
            return question(connection, *arguments)
    finally:
        engine.dispose()


def calls(line: Line, *arguments) -> dict[tuple[str, str], tuple[int, int, int, int]]:
    """(verdicts, reviewed, false calls, escapes) by expert and version."""
    matches: list[ExpertCalls] = ask(line, calls_by_version, *arguments)
    return {(c.expert, c.expert_version): (c.verdicts, c.reviewed, c.false_calls, c.escapes) for c in matches}


def test_a_false_call_is_the_last_expert_s_and_an_escape_everybody_s(line: Line):
    failed_by_solder = judged(line, "fail", ("r0402", OLD), ("solder", OLD))
    passed_by_both = judged(line, "pass", ("r0402", OLD), ("solder", OLD))
    failed_at_once = judged(line, "fail", ("r0402", NEW))
    judged(line, "pass", ("r0402", NEW))
    line.review(failed_by_solder, "pass")
    line.review(passed_by_both, "fail")
    line.review(failed_at_once, "pass")
    assert calls(line) == {
        ("r0402", OLD): (2, 2, 0, 1),
        ("solder", OLD): (2, 2, 1, 1),
        ("r0402", NEW): (2, 1, 1, 0),
    }
    assert calls(line, "solder") == {("solder", OLD): (2, 2, 1, 1)}
    after = ask(line, lambda connection: connection.execute(calls_statement(None, passed_by_both)).all())
    assert [(row.expert, row.expert_version, row.verdicts) for row in after] == [("r0402", NEW, 2)]


def test_the_newest_review_counts(line: Line):
    image = judged(line, "fail", ("r0402", OLD))
    line.review(image, "pass")
    line.review(image, "fail")
    assert calls(line) == {("r0402", OLD): (1, 1, 0, 0)}


def test_recent_confidences_are_the_newest_of_each_version_by_label(line: Line, monkeypatch: pytest.MonkeyPatch):
    for confidence in (0.01, 0.5, 0.96, 0.97):
        judged(line, "pass", ("r0402", OLD), confidence=confidence)
    judged(line, "pass", ("r0402", NEW), label="bad", confidence=0.5)
    judged(line, "pass", ("r0402", NEW), label="ok", confidence=None)
    matches = ask(line, recent_confidences)
    assert matches[("r0402", OLD, USUAL)]["ok"][0] == 1
    assert matches[("r0402", OLD, USUAL)]["ok"][10] == 1
    assert matches[("r0402", OLD, USUAL)]["ok"][19] == 2
    assert {label: sum(counts) for label, counts in matches[("r0402", NEW, USUAL)].items()} == {"bad": 1}
    monkeypatch.setattr(reviews, "RECENT_ANSWERS", 2)
    newest = ask(line, recent_confidences, "r0402")
    assert newest[("r0402", OLD, USUAL)] == {"ok": [0] * 19 + [2]}


def test_other_settings_of_the_same_weights_are_counted_apart(line: Line):
    warmer = SETTINGS.replace("1.3", "2.0")
    judged(line, "fail", ("r0402", OLD))
    line.clock.pass_s(60)
    called = judged(line, "fail", ("r0402", OLD), settings=warmer, confidence=0.5)
    line.review(called, "pass")
    first, second = ask(line, calls_by_version)
    assert (first.expert_settings, first.verdicts, first.false_calls) == (USUAL, 1, 0)
    assert (second.expert_settings, second.verdicts, second.false_calls) == (digest_of(warmer), 1, 1)
    assert str(first.first_used_at) < str(second.first_used_at)
    histograms = ask(line, recent_confidences)
    assert histograms[("r0402", OLD, USUAL)]["ok"][19] == histograms[("r0402", OLD, digest_of(warmer))]["ok"][10] == 1
    assert ask(line, answered_settings) == {("r0402", USUAL): SETTINGS, ("r0402", digest_of(warmer)): warmer}


def test_settings_whose_text_was_changed_are_not_believed(line: Line):
    judged(line, "pass", ("r0402", OLD))
    line.rows("UPDATE expert_settings SET settings = replace(settings, '1.3', '1.1')")
    assert ask(line, answered_settings) == {}


def test_a_picture_that_came_again_is_no_more_evidence(line: Line):
    for picture in (b"one", b"two", b"one", b"one"):
        judged(line, "pass", ("r0402", OLD), ("solder", OLD), picture=picture)
    judged(line, "pass", ("r0402", NEW), picture=b"one")
    counts = {key: sum(map(sum, by_label.values())) for key, by_label in ask(line, recent_confidences).items()}
    assert counts == {("r0402", OLD, USUAL): 2, ("solder", OLD, USUAL): 2, ("r0402", NEW, USUAL): 1}
