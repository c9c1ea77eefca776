"""Rows that the store writes, and the state that a restart finds."""

import json
import os
import sqlite3
import stat
from contextlib import closing

import pytest
import structlog
from sqlalchemy import update

from daemon.records import ExpertSwitch, ExpertVersion, JournalKey, Pixels, Verdict
from daemon.storage.database.connections import StoreError
from daemon.storage.database.rows import ImageCopy
from daemon.storage.database.schema import boards
from daemon.storage.database.store import Store
from tests.daemon.storage.database.store_parts import a_box, a_line, a_stage, a_verdict, an_image, some_rules
from tests.editions import next_edition


def rows(line, query, *values):
    with closing(sqlite3.connect(line.folder / "inspection.db")) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(query, values)]


def test_an_accepted_image_has_its_row_before_anybody_judges_it(line):
    (accepted,) = line.accept(an_image("a", lot="L1", station="AOI2", deadline_ms=500))
    (row,) = rows(line, "SELECT * FROM inspections")
    assert row["status"] == "accepted"
    assert (row["verdict"], row["seq"], row["completed_at"], row["image_path"], row["latency_ms"]) == (None,) * 5
    assert row["accepted_at"] == "2026-11-21T09:08:11.123Z"
    assert (row["deadline_ms"], row["late"], row["image_bytes"]) == (500, 0, 8)
    assert accepted.accepted_s == line.clock.clock.monotonic_s()
    assert (row["rules_version"], row["edition"]) == (line.serving.current.routes.version, accepted.edition)
    (board,) = rows(line, "SELECT * FROM boards")
    expected = {
        "attempt": 1,
        "expected": 4,
        "inspected": 0,
        "verdict": None,
        "seq": None,
        "lot": "L1",
        "station": "AOI2",
    }
    assert expected.items() <= board.items()


def test_a_verdict_is_written_with_its_stages_and_boxes_and_published_as_stored(line, reader):
    (accepted,) = line.accept(an_image("a"))
    line.clock.pass_s(0.25)
    stages = [a_stage("r50"), a_stage("yolo", label=None, confidence=None, detections=(a_box(), a_box("void", 0.6)))]
    (message,) = line.judge(a_verdict(accepted, "fail", "D207", stages=stages))
    assert message.topic == "inspection/mainboard-a/S1/"
    assert message.body["latency_ms"] == 250.0
    assert message.body["at"] == "2026-11-21T09:08:11.373Z"
    assert [stage["expert"] for stage in message.body["stages"]] == ["r50", "yolo"]
    assert [box["label"] for box in message.body["stages"][1]["detections"]] == ["bridge", "void"]
    assert [row["step"] for row in rows(line, "SELECT * FROM stages ORDER BY step")] == [0, 1]
    assert [(row["step"], row["x2"]) for row in rows(line, "SELECT * FROM detections")] == [(1, 30.5), (1, 30.5)]
    assert json.dumps(reader.results_since(0)["items"][0]) == json.dumps({"topic": message.topic, **message.body})


def test_a_second_outcome_of_an_image_changes_nothing(line):
    (accepted,) = line.accept(an_image("a"))
    assert len(line.judge(a_verdict(accepted, "fail"))) == 1
    assert line.judge(a_verdict(accepted, "pass"), a_verdict(an_image("b"), "pass")) == []
    assert [row["verdict"] for row in rows(line, "SELECT verdict FROM inspections")] == ["fail"]


def test_downtime_counts_toward_a_boards_time_limit(line):
    line.inspect("R0402", "R1")
    (waiting,) = line.accept(an_image("w", "R0402", "R2"))
    line.reopen(down_s=19.0)
    assert line.judge() == []
    assert line.store.wait_s() == pytest.approx(1.0, abs=0.01)
    line.reopen(down_s=3600.0)
    (board,) = line.judge()
    assert (board.body["verdict"], board.body["reason"], board.body["inspected"]) == ("unknown", "time_limit", 1)
    # Accepted in time and judged after the closing: stored, marked late, and the board stays as it was.
    (image,) = line.judge(a_verdict(waiting, "fail"))
    assert image.body["late"] is True
    (row,) = rows(line, "SELECT verdict, inspected FROM boards")
    assert (row["verdict"], row["inspected"]) == ("unknown", 1)


def test_an_attempt_keeps_the_rules_it_opened_with(line):
    old = line.serving.current.routes
    line.inspect("R0402", "R1", serial="OLD")
    new = some_rules(
        "boards:\n  mainboard-a:\n    components: {R0402: 1}\nclassifiers:\n  '*': {expert: e, pass: [ok]}\n"
    )
    next_edition(line.serving, new)
    images = line.accept(an_image("x", "R0402", "R2", serial="OLD"), an_image("y", serial="NEW"))
    assert [image.edition for image in images] == [1, 2]
    closed = [m.body for m in line.judge(*(a_verdict(i) for i in images)) if m.topic.startswith("board")]
    assert [(body["board"]["serial"], body["expected"]) for body in closed] == [("NEW", 1)]
    line.reopen()
    assert list(line.store.recover().editions) == [1]
    assert {row["rules_version"] for row in rows(line, "SELECT * FROM rules_versions")} == {old.version, new.version}


def test_a_restart_finds_what_waits_with_all_that_judging_needs(line):
    raw = an_image("raw", pixels=Pixels("raw", (2, 3, 1)), payload=b"123456", deadline_ms=1000)
    images = line.accept(raw, an_image("jpg"), an_image("done"))
    line.judge(a_verdict(images[2], stages=[a_stage(batch_id=41)]))
    line.reopen(down_s=100.0)
    recovery = line.store.recover()
    assert recovery.pending == images[:2]
    assert (recovery.last_seq, recovery.last_batch_id) == (1, 41)


def test_images_that_stay_hold_their_segment_until_they_are_copied(tmp_path):
    line = a_line(tmp_path, keep=("fail",))
    failed, passed = line.store.accept(
        [(an_image("f"), JournalKey(1, 16, 8)), (an_image("p"), JournalKey(2, 16, 8))], line.serving
    )
    written = line.store.write_results([a_verdict(failed, "fail"), a_verdict(passed, "pass")])
    assert [image for image, _ in written.to_copy] == [failed]
    assert written.done == [("cam1", 8), ("cam1", 8)]
    assert line.store.segments_in_use == {1}
    line.reopen()
    assert line.store.segments_in_use == {1}
    assert line.store.copies_to_make() == written.to_copy
    assert line.store.recover().pending == []
    line.store.write_results([ImageCopy(failed.inspection_id, "images/a.jpg")])
    assert line.store.segments_in_use == set()
    assert rows(line, "SELECT image_path FROM inspections WHERE image_id = 'f'") == [{"image_path": "images/a.jpg"}]
    line.store.close()


def test_experts_are_noted_at_their_first_verdict_and_loads_as_they_come(tmp_path):
    version = ExpertVersion(
        "r50", "0123456789ab", "0123456789ab" + 52 * "0", "resnet50", ("ok", "nok"), 94, "f32", "x.pt"
    )
    line = a_line(tmp_path, expert_version=lambda expert, _version: version if expert == "r50" else None)
    for n in range(2):
        line.inspect("R0402", f"R{n}")
    switch = ExpertSwitch(line.clock.clock.wall_s(), "cuda:0/0", "cuda:0", "r50", ("r18",), 94, 12.5, "disk", "demand")
    line.store.write_results([switch])
    (row,) = rows(line, "SELECT * FROM expert_versions")
    assert (json.loads(row["classes"]), row["first_used_at"]) == (["ok", "nok"], "2026-11-21T09:08:11.123Z")
    (row,) = rows(line, "SELECT * FROM expert_switches")
    assert (row["loaded"], json.loads(row["evicted"]), row["tier"], row["cause"]) == ("r50", ["r18"], "disk", "demand")
    line.store.close()


def test_a_failed_transaction_leaves_memory_as_the_disk_is(line):
    images = line.accept(*(an_image(f"i{n}", "QFP64", f"U{n + 1}") for n in range(2)))
    line.inspect("R0402", "R1")
    line.inspect("R0402", "R2")
    broken = Verdict(images[1], "maybe")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not in tuple"):
        line.judge(a_verdict(images[0]), broken)
    messages = line.judge(*(a_verdict(image) for image in images))
    assert [message.seq for message in messages] == [3, 4, 5]
    assert messages[-1].body["verdict"] == "pass"


def test_the_database_is_for_the_group_to_read_and_is_made_for_incremental_vacuum(tmp_path):
    old = os.umask(0o077)
    try:
        line = a_line(tmp_path / "line")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "line").stat().st_mode) == 0o750
    for path in (tmp_path / "line").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path.name
    with line.store.engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("auto_vacuum", "journal_mode", "synchronous", "foreign_keys")
        }
    assert pragmas == {"auto_vacuum": 2, "journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    line.store.close()


def test_a_reader_cannot_write_and_works_beside_the_writer_and_after_it(tmp_path):
    line = a_line(tmp_path)
    line.inspect("R0402", "R1")
    reader = line.reader()
    assert reader.last_seq() == 1
    with pytest.raises(Exception, match="readonly"), reader._engine.begin() as connection:
        connection.execute(update(boards).values(lot="x"))
    line.inspect("R0402", "R2")
    assert reader.last_seq() == 2
    reader.close()
    line.store.close()
    alone = line.reader()
    assert alone.last_seq() == 2
    alone.close()


def test_a_database_in_memory_is_refused():
    with pytest.raises(StoreError, match="expected a file"):
        Store("sqlite://")


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "inspection.db").write_bytes(b"this is a letter, not a database" * 100)
    with pytest.raises(StoreError, match="not a database"):
        Store(f"sqlite:///{tmp_path}/inspection.db")


def test_a_verdict_that_becomes_durable_after_its_deadline_is_unknown(line):
    images = line.accept(an_image("a", deadline_ms=500), an_image("b", deadline_ms=501), an_image("c"))
    line.clock.pass_s(0.5005)
    line.judge(*(a_verdict(image, "fail", "D1") for image in images))
    assert rows(line, "SELECT image_id, verdict, defect, reason FROM inspections ORDER BY 1") == [
        {"image_id": "a", "verdict": "unknown", "defect": None, "reason": "deadline"},
        {"image_id": "b", "verdict": "fail", "defect": "D1", "reason": None},
        {"image_id": "c", "verdict": "fail", "defect": "D1", "reason": None},
    ]


@pytest.mark.parametrize(("serial", "told"), [("NoRead", [20]), ("???", [20]), ("S1", [])])
def test_a_serial_that_a_scanner_reports_for_nothing_is_told_once(line, serial, told):
    with structlog.testing.capture_logs() as logs:
        for _ in range(30):
            line.inspect("R0402", "R1", type="tiny", serial=serial)
    repeats = [log for log in logs if log["event"] == "serial_repeats"]
    assert [log["times"] for log in repeats] == told
    assert all((log["serial"], log["source"]) == (serial, "cam1") and "scanner" in log["advice"] for log in repeats)
