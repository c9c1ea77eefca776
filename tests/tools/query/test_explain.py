"""`coserve explain`: the explanation of every verdict of a line is that verdict, and what cannot be told is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from daemon.storage.database.connections import open_for_reading
from tests.contract.client import Line
from tests.sql import sql
from tests.tools.run_commands import coserve
from tools.query.reading import InspectionRecord, read_inspection
from tools.query.retrace import StoredRules, retrace
from tools.terminal.console import CommandError


def explain(folder: Path, *arguments: str, status: int = 0) -> str:
    done = coserve("explain", *arguments, "--config", folder / "coserve.yaml", status=status)
    return done.stdout or done.stderr


def as_json(folder: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    return json.loads(explain(folder, *arguments, "--json", status=status))


def record_of(line: Line, *name: str | int | None) -> InspectionRecord:
    engine = open_for_reading(f"sqlite:///{line.folder}/inspection.db")
    try:
        return read_inspection(engine, (*name, *[None] * (4 - len(name))))
    finally:
        engine.dispose()


@pytest.mark.promise(
    "Queries and exports",
    "An explanation matches its verdict: judging the stored answers again gives every verdict of a line, and a "
    "changed row is reported as a contradiction",
)
def test_every_verdict_of_a_line_is_what_the_rules_give_once_more(judged: Line) -> None:
    stored = judged.rows("SELECT inspection_id, verdict, defect, reason FROM inspections")
    assert {verdict for _, verdict, _, _ in stored} == {"pass", "fail", "review", "unknown"}
    assert {reason for *_, reason in stored} == {None, "deadline", "expert_failed", "bad_image"}
    for number, verdict, defect, _ in stored:
        record = record_of(judged, str(number))
        rules = StoredRules.of(record.inspection["rules_version"], (record.rules or {})["text"])
        again = retrace(record, rules, judged.folder / "images")
        assert (again.verdict, again.defect, again.gap, again.contradiction) == (verdict, defect, None, None), again
        assert len(again.judged) == len(record.stages)


def test_a_chain_is_told_step_by_step_with_the_line_of_each_rule(judged: Line) -> None:
    rules_lines = (judged.folder / "rules.yaml").read_text(encoding="utf-8").splitlines()
    report = as_json(judged.folder, "S1", "F-0")
    assert [stage["rule"] for stage in report["stages"]] == ['classifiers: "F"', 'detectors: "solder"']
    for stage, key in zip(report["stages"], ("F:", "solder:"), strict=True):
        assert rules_lines[stage["rule_line"] - 1].strip().startswith(key)
    assert report["stages"][0]["goes_on_to"] == "solder"
    (required,) = [finding for finding in report["stages"][1]["findings"] if finding["verdict"] == "fail"]
    assert required["text"] == "found 0 'void', expected at least 64"
    words = "\n".join(report["words"])
    assert "F-0, type F, failed (D301)" in words
    assert 'Verdict: fail D301, decided at step 2 by detectors: "solder"' in words
    assert "judged once more from the stored answers by those rules: the same" in words


def test_where_boxes_lie_is_judged_by_the_size_of_the_kept_picture(judged: Line, line: Path) -> None:
    for kept in ("DM-0", "raw"):
        assert "the same" in explain(judged.folder, "S1", kept)
    sql(line, "UPDATE inspections SET image_path = NULL")
    recomputed = as_json(line, "S1", "DM-0")["recomputed"]
    assert (recomputed["agrees"], recomputed["contradiction"]) == (False, None)
    assert "the picture is not kept" in recomputed["gap"]


@pytest.mark.parametrize(
    ("designator", "reason", "words"),
    [
        ("X1", "expert_failed", "broken gave no answer"),
        ("bad", "bad_image", "Look at camera and cable"),
        ("hasty-0", "deadline", "the camera gave it 1 ms"),
    ],
)
def test_an_image_without_a_verdict_has_its_reason_in_words(
    judged: Line, designator: str, reason: str, words: str
) -> None:
    text = explain(judged.folder, "S1", designator)
    assert f"Verdict: unknown, because of {reason}: " in text
    assert words in text


def test_what_a_guard_sent_to_review_agrees_with_the_rules_and_says_why(line: Path) -> None:
    guarded = "UPDATE inspections SET verdict = 'review', reason = 'repeated_picture' WHERE designator = 'P-0'"
    sql(line, guarded)
    text = explain(line, "S1", "P-0")
    assert "Verdict: review, because of repeated_picture: its source had just sent the same picture" in text
    assert "judged once more from the stored answers by those rules: the same" in text


def test_an_inspection_is_found_by_number_by_image_and_by_place(judged: Line) -> None:
    ((number, image_id),) = judged.rows("SELECT inspection_id, image_id FROM inspections WHERE designator = 'F-1'")
    by_number, by_image = record_of(judged, str(number)), record_of(judged, f"cam-1/{image_id}")
    assert by_number == by_image == record_of(judged, "S1", "F-1")
    second = record_of(judged, "S2", "P1")
    assert second.board["attempt"] == 2
    assert len(second.others) == 1
    first = record_of(judged, "S2", "P1", None, 1)
    assert (first.board["attempt"], first.inspection["inspection_id"]) == (1, second.others[0])


@pytest.mark.parametrize("name", ["nix", "0", "99999999999999999999", "cam-1/none", "1 OR 1=1", "' OR ''='"])
def test_what_is_not_there_is_status_1_with_the_ways_to_ask(judged: Line, name: str) -> None:
    with pytest.raises(CommandError, match="SERIAL DESIGNATOR"):
        record_of(judged, name)


def test_reviews_after_it_and_the_final_verdict_are_told(line: Path) -> None:
    ((number,),) = sql(line, "SELECT inspection_id FROM inspections WHERE designator = 'F-0'")
    for reviewer, verdict, note in (("anna", "fail", None), ("bert", "pass", "a\x1b[31m shadow")):
        insert = "INSERT INTO reviews (inspection_id, at, reviewer, verdict, note) VALUES (?, ?, ?, ?, ?)"
        sql(line, insert, values=(number, "2026-11-22T10:00:00.000Z", reviewer, verdict, note))
    text = explain(line, str(number))
    assert "Review 2026-11-22 10:00:00 UTC by anna: fail" in text
    assert "\x1b" not in text
    assert text.rstrip().endswith("Final verdict: pass, decided by bert, so a false call.")


def test_a_row_that_was_changed_contradicts_the_rules_and_is_status_1(line: Path) -> None:
    sql(line, "UPDATE inspections SET verdict = 'pass', defect = NULL WHERE designator = 'F-0'")
    text = explain(line, "S1", "F-0", status=1)
    assert "CONTRADICTION: the rules give fail D301; stored is pass" in text
    sql(line, "UPDATE stages SET expert = 'C0603' WHERE step = 1")
    assert "answered by C0603: the rules name the expert yolo-solder" in explain(line, "S1", "F-1", status=1)
