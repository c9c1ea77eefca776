"""`coserve db check` names every row that no longer agrees with the others: table, key, and what was expected."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from daemon.config.settings import Guards
from daemon.records import Image
from daemon.storage.database.connections import open_for_reading
from daemon.storage.database.schema import boards
from daemon.storage.database.upkeep import check_database
from tests.contract.client import Line
from tests.daemon.storage.database.store_parts import a_line as a_store
from tests.daemon.storage.database.store_parts import a_stage, a_verdict, an_image
from tests.sql import sql
from tests.tools.run_commands import coserve
from tools.query.evidence import Evidence, check_evidence


def checked(line: Path, since: str | None = None, **options: bool) -> Evidence:
    engine = open_for_reading(f"sqlite:///{line}/inspection.db")
    try:
        is_chosen = None if since is None else boards.c.completed_at >= since
        return check_evidence(engine.connect, line / "images", is_chosen, **options)
    finally:
        engine.dispose()


def test_a_line_that_judged_in_every_way_has_no_mistake(judged: Line) -> None:
    done = json.loads(coserve("db", "check", "--images", "--json", "--config", judged.config).stdout)
    ((images, pictures, boards),) = judged.rows(
        "SELECT count(*), count(image_path), (SELECT count(*) FROM boards) FROM inspections"
    )
    assert (done["problems"], done["images"], done["pictures"], done["boards"]) == ([], images, pictures, boards)
    assert done["images"] > 50
    said = coserve("db", "check", "--config", judged.config).stdout
    assert "No mistakes found" in said
    assert f"{boards} boards, {images} images" in said


@pytest.mark.promise(
    "A full disk, and years of results",
    "`coserve db check` names each row that contradicts another: a changed text, verdict, answer, board, a "
    "changed or deleted decision; and a picture that was not sent",
)
@pytest.mark.parametrize(
    ("harm", "named"),
    [
        ("UPDATE inspections SET verdict = 'fail', defect = 'D9' WHERE inspection_id = 1", "stored is fail D9"),
        ("UPDATE inspections SET defect = 'D7' WHERE verdict = 'fail'", "stored is fail D7"),
        ("UPDATE inspections SET verdict = 'pass', reason = NULL WHERE reason = 'bad_image'", "no expert's answer"),
        ("UPDATE inspections SET reason = 'repeated_picture' WHERE verdict = 'fail'", "is for a pass, not fail"),
        ("UPDATE inspections SET reason = 'repeated_picture' WHERE verdict = 'pass'", "give review; stored is pass"),
        ("UPDATE inspections SET rules_version = 'abc' WHERE inspection_id = 1", "its board opened with"),
        ("UPDATE inspections SET late = 1 WHERE inspection_id = 1", "inspections 1: late is 1"),
        ("UPDATE stages SET confidence = 0.001 WHERE expert = 'QFP64'", "stored is"),
        ("UPDATE stages SET expert = 'C0603' WHERE inspection_id = 1", "by C0603: the rules name the expert R0402"),
        ("DELETE FROM stages WHERE inspection_id = 1", "no expert's answer is stored"),
        ("UPDATE stages SET expert_settings = 'abc' WHERE inspection_id = 1", "_settings R0402 abc: its row is gone"),
        ("UPDATE detections SET confidence = 1.5 WHERE detection_id = 1", "its surest box is"),
        ("UPDATE rules_versions SET text = text || ' '", "rules_versions"),
        ("DELETE FROM rules_versions", "its row is gone, and rows of inspections name it"),
        ("UPDATE recipes SET positions = '[]'", "it is not the recipe of the rules' text"),
        ("UPDATE expert_settings SET settings = replace(settings, '1.0', '1.1')", "its settings was changed"),
        ("UPDATE expert_versions SET sha256 = 'x'", "its sha256 is that of another version"),
        ("UPDATE boards SET verdict = 'pass' WHERE verdict = 'unknown'", "verdict is pass, its images give unknown"),
        ("UPDATE boards SET inspected = 1 WHERE serial = 'S2'", "inspected is 1, its images give 2"),
        ("UPDATE boards SET reason = 'complete' WHERE serial = 'Q1'", "reason is complete, its images give time_limit"),
        ("UPDATE boards SET failed = '[1]' WHERE serial = 'S2'", "failed is [1], its images give"),
        ("DELETE FROM inspections WHERE designator = 'F1'", "inspected is 2, its images give 1"),
        ("DELETE FROM changes WHERE change_id = 2", "changes 2: deleted"),
        ("DELETE FROM runs", "runs 1: deleted"),
    ],
)  # fmt: skip
def test_a_changed_or_deleted_row_is_named(line: Path, harm: str, named: str) -> None:
    sql(line, "PRAGMA foreign_keys = OFF", harm)
    assert named in "\n".join(checked(line).problems)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (["DELETE FROM reviews WHERE review_id = 2"], "reviews 2: deleted, and no row of this table ever is"),
        (["DELETE FROM reviews WHERE review_id > 1"], "reviews 2 to 3: deleted"),
        (["UPDATE reviews SET undo_of = 99 WHERE review_id = 3"], "reviews 3: undo_of is 99"),
        (["UPDATE reviews SET undo_of = 1, inspection_id = 2 WHERE review_id = 3"], "reviews 3: undo_of is 1"),
        (["UPDATE reviews SET verdict = 'fail' WHERE review_id = 3"], "the decisions about its board give fail"),
    ],
)  # fmt: skip
def test_a_changed_or_deleted_review_is_named(line: Path, harm: list[str], named: str) -> None:
    final = (
        "UPDATE reviews SET board_verdict = (SELECT verdict FROM final_boards WHERE board_id ="
        " (SELECT board_id FROM inspections WHERE inspection_id = reviews.inspection_id)) WHERE review_id = 3"
    )
    review = (
        "INSERT INTO reviews (at, reviewer, verdict, seq, inspection_id)"
        " SELECT '2026-11-25T00:00:00.000Z', 'Eva', 'pass', last_seq + 1, inspection_id"
        " FROM stream_position, inspections JOIN boards USING (board_id)"
        " WHERE serial = 'S2' AND attempt = 1 AND designator = 'F1'"
    )
    sql(line, *[review, "UPDATE stream_position SET last_seq = last_seq + 1"] * 3, final)
    assert checked(line).problems == []
    assert check_database(f"sqlite:///{line}/inspection.db", line / "images", line / "journal") == []
    sql(line, *harm)
    assert named in "\n".join(checked(line).problems)
    if "DELETE" in harm[0]:  # it is missing in the stream too
        assert "are missing" in "\n".join(
            check_database(f"sqlite:///{line}/inspection.db", line / "images", line / "journal")
        )


def test_a_picture_that_was_not_sent_is_named_when_pictures_are_compared(line: Path) -> None:
    picture = next((line / "images").rglob("*.jpg"))
    content = bytearray(picture.read_bytes())
    content[len(content) // 2] ^= 1
    picture.write_bytes(content)
    assert checked(line).problems == []
    (problem,) = checked(line, with_pictures=True).problems
    assert f"inspections {picture.stem} " in problem
    assert "is not the picture that was sent (sha256)" in problem


@pytest.mark.parametrize("seed", range(2))
def test_boards_of_any_history_agree_with_their_images(tmp_path: Path, seed: int) -> None:
    """Repeats, extras, late and refused images, named attempts, time limits, restarts, as the writer writes them."""
    chance, store, waiting = random.Random(seed), a_store(tmp_path, guards=Guards()), list[Image]()
    store.store.keep_rules(store.serving.current.routes)
    for number in range(400):
        step = chance.random()
        if step < 0.5:
            place = ("R0402", chance.choice(("R1", "R2", "R3")))
            board: dict[str, Any] = {
                "type": chance.choice(("mainboard-a", "tiny", "loose")),
                "serial": chance.choice("AB"),
            }
            named = chance.choice((None, None, None, 1, 2))
            payload = b"%d" % chance.randrange(100)
            answers = store.ask(an_image(f"i{number}", *place, attempt=named, payload=payload, **board))
            waiting += [answer for answer in answers if isinstance(answer, Image)]
        elif step < 0.9 and waiting:
            image = waiting.pop(chance.randrange(len(waiting)))
            bad = a_stage("R0402", label="bad", confidence=chance.choice((0.01, 0.99)))
            unsure = a_verdict(image, "unknown", reason="expert_failed", stages=[])
            sound = a_verdict(image, stages=[a_stage("R0402")])
            judged = a_verdict(image, "review" if bad.confidence == 0.01 else "fail", "bad", stages=[bad])
            store.judge(chance.choice((sound, sound, judged, unsure)))
        elif step < 0.97:
            store.clock.pass_s(chance.choice((1, 3, 8)))
            store.store.write_results()
        else:
            store.reopen(5)
    evidence = checked(tmp_path)
    store.store.close()
    assert evidence.problems == []
    assert evidence.boards > 20


def test_a_damaged_page_ends_no_check(line: Path) -> None:
    path = line / "inspection.db"
    ((root,),) = sql(path, "SELECT rootpage FROM sqlite_master WHERE name = 'stages'")
    with path.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 100)
    assert "cannot be read" in "\n".join(checked(line).problems)
