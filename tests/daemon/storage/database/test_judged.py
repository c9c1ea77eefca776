"""Outcomes of each expert version's answers, from a database as the daemon writes it."""

from daemon.storage.database.connections import open_for_reading
from daemon.storage.database.reviews import ExpertCalls, calls_by_version, confidences_statement, recent_confidences
from tests.daemon.storage.database.store_parts import Line, a_stage, an_arrival, an_outcome

OLD, NEW = "0" * 12, "1" * 12


def judged(
    line: Line,
    verdict,
    *stages: tuple[str, str],
    label: str = "ok",
    confidence: float | None = 0.97,
    picture: bytes | None = None,
) -> int:
    """One image that went through `stages` (expert, version)."""
    line.images += 1
    payload = picture or f"picture {line.images}".encode()
    (image,) = line.accept(an_arrival(f"image-{line.images}", type="loose", serial=f"S{line.images}", payload=payload))
    answers = [
        a_stage(expert, expert_version=version, label=label, confidence=confidence) for expert, version in stages
    ]
    line.judge(an_outcome(image.inspection_id, verdict, stages=answers))
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
    assert calls(line, None, passed_by_both) == {("r0402", NEW): (2, 1, 1, 0)}


def test_the_newest_review_counts(line: Line):
    image = judged(line, "fail", ("r0402", OLD))
    line.review(image, "pass")
    line.review(image, "fail")
    assert calls(line) == {("r0402", OLD): (1, 1, 0, 0)}


def test_recent_confidences_are_the_newest_of_each_version_by_label(line: Line):
    for confidence in (0.01, 0.5, 0.96, 0.97):
        judged(line, "pass", ("r0402", OLD), confidence=confidence)
    judged(line, "pass", ("r0402", NEW), label="bad", confidence=0.5)
    judged(line, "pass", ("r0402", NEW), label="ok", confidence=None)
    matches = ask(line, recent_confidences)
    assert matches[("r0402", OLD)]["ok"][0] == 1
    assert matches[("r0402", OLD)]["ok"][10] == 1
    assert matches[("r0402", OLD)]["ok"][19] == 2
    assert {label: sum(counts) for label, counts in matches[("r0402", NEW)].items()} == {"bad": 1}
    newest = ask(line, recent_confidences, "r0402", 2)
    assert newest[("r0402", OLD)] == {"ok": [0] * 19 + [2]}


def test_a_picture_that_came_again_is_no_more_evidence(line: Line):
    for picture in (b"one", b"two", b"one", b"one"):
        judged(line, "pass", ("r0402", OLD), ("solder", OLD), picture=picture)
    judged(line, "pass", ("r0402", NEW), picture=b"one")
    counts = {key: sum(map(sum, by_label.values())) for key, by_label in ask(line, recent_confidences).items()}
    assert counts == {("r0402", OLD): 2, ("solder", OLD): 2, ("r0402", NEW): 1}


def test_the_questions_are_plain_sql_that_postgresql_takes_too():
    from sqlalchemy.dialects import postgresql

    from daemon.storage.database.reviews import calls_statement

    for statement in (calls_statement("r0402", 7), confidences_statement("r0402")):
        sql = str(statement.compile(dialect=postgresql.dialect()))
        assert sql.startswith("SELECT")
