"""RESULTS.md, held by hand-computed values: tables, columns, views, on a stock sqlite3 without extensions."""

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.dashboard.web import RULES_VERSION, Web

TABLES = {
    "boards": "board_id board_type serial attempt lot station first_seen_at completed_at expected inspected verdict "
    "reason rules_version seq edition",
    "inspections": "inspection_id source image_id board_id component designator captured_at accepted_at completed_at "
    "deadline_ms image_bytes status verdict defect reason late rules_version image_sha256 image_path latency_ms seq "
    "edition",
    "stages": "inspection_id step expert expert_version label confidence device executor batch_id batch_size queued_ms "
    "load_ms infer_ms expert_settings",
    "detections": "detection_id inspection_id step label confidence x1 y1 x2 y2",
    "expert_switches": "switch_id at executor device loaded evicted bytes load_ms tier cause",
    "reviews": "review_id inspection_id at reviewer verdict defect note board_id undo_of seq epoch",
    "expert_settings": "expert expert_settings settings first_used_at",
    "changes": "change_id at who what subject old new note",
    "editions": "edition parent created_at who why rules_version sha256 note",
    "runs": "run_id started_at ended_at version epoch",
    "generations": "generation_id source request_id board_id model mode task prompt text prompt_tokens new_tokens "
    "ttft_ms tpot_ms total_ms expert_fetches predictor_hit_rate brownout_threshold accepted_at completed_at "
    "status reason seq",
    "rules_versions": "rules_version sha256 loaded_at text",
    "expert_versions": "expert expert_version sha256 architecture classes bytes dtype origin first_used_at",
}
VIEWS = {
    "stream": "seq kind key",
    "board_yield": "board_type lot day boards passed failed review unknown first_pass_yield final_passed final_yield",
    "final_boards": "board_id board_type serial attempt lot verdict decided_by decided_at verdict_by_line",
    "defect_pareto": "board_type component defect count share cumulative_share",
    "component_health": "component inspected fail_rate review_rate unknown_rate mean_confidence overridden",
    "latency_by_hour": "hour inspections p50_ms p95_ms max_ms",
    "expert_usage": "expert images batches mean_batch loads load_ms load_share",
    "false_calls": "component false_calls escapes reviewed",
    "final_verdicts": "inspection_id verdict defect decided_by",
}


class Database(Web):
    """A results database that a test fills row by row, over one connection that enforces keys; rows get numbers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seq = 0
        at = {"created_at": "2026-11-21T08:00:00.000Z", "who": "anna", "why": "reload"}
        self.add("editions", edition=1, **at, rules_version=RULES_VERSION, sha256="0" * 64)

    @cached_property
    def connection(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.database)
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def sql(self, statement: str, **values: object) -> list[tuple[Any, ...]]:
        with self.connection:
            return self.connection.execute(statement, values).fetchall()

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def next_number(self, table: str) -> int:
        return self.sql(f"SELECT count(*) + 1 FROM {table}")[0][0]  # noqa: S608

    def board(self, serial: str, verdict: str | None = "pass", **values: Any) -> int:
        number, seq = self.next_number("boards"), {"seq": self.next_seq()} if verdict else {}
        usual = {"board_type": "a", "lot": None, "expected": 1, "inspected": 1} | seq
        self.add_board(number, serial, verdict, **usual | values)
        return number

    def image(self, board: int, verdict: str | None = "pass", component: str = "R", **values: Any) -> int:
        number, seq = self.next_number("inspections"), {"seq": self.next_seq()} if verdict else {}
        self.add_image(number, board, verdict, **{"component": component} | seq | values)
        return number


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "line")
    with closing(database.connection):
        yield database


@pytest.mark.parametrize(("name", "columns"), [*TABLES.items(), *VIEWS.items()])
def test_every_column_of_the_contract_is_there(database, name, columns):
    names = [row[1] for row in database.sql(f"PRAGMA table_info({name})")]
    assert [column for column in columns.split() if column not in names] == []
    if name in VIEWS:
        assert names == columns.split()


def test_durations_and_boxes_are_real_and_times_are_text(database):
    kinds = {(table, row[1]): row[2] for table in TABLES for row in database.sql(f"PRAGMA table_info({table})")}
    for (table, column), kind in kinds.items():
        if (column.endswith("_ms") and column != "deadline_ms") or column in ("x1", "y1", "x2", "y2", "confidence"):
            assert kind == "REAL", (table, column)
        if column == "at" or column.endswith("_at"):
            assert kind == "TEXT", (table, column)


def test_keys_of_the_contract_are_enforced(database):
    board = database.board("S1")
    image = database.image(board, source="cam1", image_id="x")
    database.add_stage(image)
    box = {"inspection_id": image, "step": 1, "label": "x", "confidence": 0.5, "x1": 0, "y1": 0, "x2": 1, "y2": 1}
    for violation, add in (
        ("UNIQUE", lambda: database.board("S1")),
        ("UNIQUE", lambda: database.image(board, source="cam1", image_id="x")),
        ("UNIQUE", lambda: database.board("S2", seq=1)),
        ("FOREIGN KEY", lambda: database.image(board + 1)),
        ("FOREIGN KEY", lambda: database.board("S2", edition=2)),
        ("FOREIGN KEY", lambda: database.add_stage(image + 1)),
        ("FOREIGN KEY", lambda: database.add_review(image + 1, "pass")),
        ("FOREIGN KEY", lambda: database.add("detections", **box)),
        ("CHECK", lambda: database.image(board, verdict="maybe")),
    ):
        with pytest.raises(sqlite3.IntegrityError, match=violation):
            add()


def test_stream_lists_what_has_a_seq(database):
    board = database.board("S1")
    database.image(board)
    database.image(board, verdict=None)
    database.board("S2", verdict=None)
    generation = {"source": "mes", "request_id": "g", "model": "m", "prompt": "?", "accepted_at": "", "status": "done"}
    database.add("generations", **generation, seq=database.next_seq())
    assert database.sql("SELECT * FROM stream ORDER BY seq") == [
        (1, "board", 1),
        (2, "inspection", 1),
        (3, "generation", 1),
    ]


def test_the_final_verdict_of_a_board_is_the_newest_decision_else_the_worst_of_its_images(database):
    cleared, decided, _ = (database.board(serial, "fail") for serial in ("cleared", "decided", "no images"))
    images = [database.image(board, "fail") for board in (cleared, decided)]
    missing = database.board("missing", "unknown", expected=2)
    database.image(missing, "pass")
    escaped = database.image(database.board("escaped", "pass"), "pass")
    database.board("open", None)

    def review(reviewer: str, verdict: str, **subject: int) -> int:
        number = database.next_number("reviews")
        at = f"2026-11-21T10:0{number - 1}:00.000Z"
        database.add("reviews", review_id=number, at=at, reviewer=reviewer, verdict=verdict, **subject)
        return number

    review("eva", "pass", inspection_id=images[0])
    review("eva", "pass", inspection_id=images[1])
    review("otto", "fail", board_id=decided)
    review("otto", "pass", inspection_id=escaped)
    review("eva", "fail", inspection_id=escaped)
    undone = review("eva", "pass", board_id=missing)
    review("daemon", "unknown", board_id=missing, undo_of=undone)
    query = "SELECT serial, verdict, decided_by, substr(decided_at, 12, 5), verdict_by_line FROM final_boards"
    assert database.sql(query) == [
        ("cleared", "pass", "eva", "10:00", "fail"),
        ("decided", "fail", "otto", "10:02", "fail"),
        ("no images", "fail", "daemon", "09:28", "fail"),
        ("missing", "unknown", "daemon", "09:28", "unknown"),
        ("escaped", "fail", "eva", "10:04", "pass"),
    ]


def test_board_yield_counts_closed_first_attempts_by_type_lot_and_day(database):
    for serial, verdict in enumerate(("pass", "pass", "fail", "review", "unknown", None)):
        database.board(f"L{serial}", verdict, lot="L1")
    database.board("L0", "pass", attempt=2, lot="L1")
    database.board("N1", "pass")
    database.board("N2", "fail")
    database.board("late", "pass", lot="L1", completed_at="2026-11-22T00:00:00.000Z")
    database.board("other", "pass", board_type="b", lot="L1")
    assert database.sql("SELECT * FROM board_yield ORDER BY board_type, lot, day") == [
        ("a", None, "2026-11-21", 2, 1, 1, 0, 0, 0.5, 1, 0.5),
        ("a", "L1", "2026-11-21", 5, 2, 1, 1, 1, 0.4, 2, 0.4),
        ("a", "L1", "2026-11-22", 1, 1, 0, 0, 0, 1.0, 1, 1.0),
        ("b", "L1", "2026-11-21", 1, 1, 0, 0, 0, 1.0, 1, 1.0),
    ]


def test_defect_pareto_shares_sum_up_within_the_board_type(database):
    a, b = database.board("A"), database.board("B", board_type="b")
    for component, defect, count in (("R", "D101", 5), ("Q", "D207", 3), ("Q", "D101", 1), ("R", None, 1)):
        for _ in range(count):
            database.image(a, "fail", component, defect=defect)
    database.image(b, "fail", "R", defect="D9")
    database.image(a, "review", "R", defect="D101")
    database.image(a, "pass", "R")
    rows = database.sql("SELECT * FROM defect_pareto ORDER BY board_type, cumulative_share")
    assert rows == [
        ("a", "R", "D101", 5, 0.5, 0.5),
        ("a", "Q", "D207", 3, 0.3, 0.8),
        ("a", "Q", "D101", 1, 0.1, 0.9),
        ("a", "R", None, 1, 0.1, 1.0),
        ("b", "R", "D9", 1, 1.0, 1.0),
    ]


def test_component_health_counts_every_finished_image(database):
    board = database.board("S")
    images = [
        database.image(board, verdict, "R")
        for verdict in ("pass", "pass", "pass", "fail", "fail", "review", "unknown", "pass")
    ]
    database.image(board, None, "R")
    database.image(board, "unknown", "Q")
    for image, confidence in zip(images, (0.9, 0.8, 0.7, 0.6), strict=False):
        database.add_stage(image, 0, confidence=confidence)
    database.add_stage(images[3], 1, confidence=0.1)  # the detector behind: not the component's own expert
    database.add_review(images[3], "pass")
    database.add_review(images[4], "pass")
    database.add_review(images[4], "fail")  # the newest agrees
    database.add_review(images[0], "pass")
    assert database.sql("SELECT * FROM component_health ORDER BY component") == [
        ("Q", 1, 0.0, 0.0, 1.0, None, 0),
        ("R", 8, 0.25, 0.125, 0.125, pytest.approx(0.75), 1),
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 19, 20, 21, 40, 100])
def test_latency_percentiles_are_nearest_rank(database, count):
    board = database.board("S")
    for n in range(count, 0, -1):
        database.image(board, latency_ms=float(n))
    database.image(board, None)
    database.image(board, completed_at="2026-11-21T10:00:00.000Z", latency_ms=7.0)
    assert database.sql("SELECT * FROM latency_by_hour ORDER BY hour") == [
        ("2026-11-21T09", count, math.ceil(count * 50 / 100), math.ceil(count * 95 / 100), float(count)),
        ("2026-11-21T10", 1, 7.0, 7.0, 7.0),
    ]


def test_expert_usage_counts_each_batch_once(database):
    board = database.board("S")
    batches = [(1, 4, 12.0, 20.0), (2, 2, 0.0, 8.0)]
    for batch_id, size, load_ms, infer_ms in batches:
        for _ in range(size):
            image = database.image(board)
            values = {"batch_id": batch_id, "batch_size": size, "load_ms": load_ms, "infer_ms": infer_ms}
            database.add_stage(image, 0, expert="r50", **values)
    database.add_stage(1, 1, expert="yolo", batch_id=3, batch_size=1, load_ms=0.0, infer_ms=5.0)
    for loaded, load_ms in (("r50", 12.0), ("r50", 30.0), ("idle", 9.0)):
        switch = {"at": "", "executor": "e", "device": "cpu", "evicted": json.dumps([]), "bytes": 1, "tier": "disk"}
        database.add("expert_switches", **switch, loaded=loaded, load_ms=load_ms, cause="demand")
    assert database.sql("SELECT * FROM expert_usage ORDER BY expert") == [
        ("idle", 0, 0, None, 1, 9.0, None),
        ("r50", 6, 2, 3.0, 2, 42.0, 0.3),
        ("yolo", 1, 1, 1.0, 0, 0.0, 0.0),
    ]


def test_a_backbone_counts_the_images_of_its_heads_and_a_head_only_its_own(database):
    sha256 = "50e527a8f71d" + "0" * 52
    for head in ("R0402", "C0603"):
        settings = json.dumps({"backbone": sha256})
        database.add("expert_settings", expert=head, expert_settings="s", settings=settings, first_used_at="")
    board = database.board("S")
    for batch_id, heads in ((1, ["R0402"] * 3 + ["C0603"]), (2, ["R0402"])):
        for head in heads:
            values = {"batch_id": batch_id, "batch_size": len(heads), "load_ms": 0.0, "infer_ms": 4.0}
            database.add_stage(database.image(board), expert=head, expert_settings="s", **values)
    switch = {"at": "", "executor": "e", "device": "cpu", "evicted": json.dumps([]), "bytes": 1, "tier": "disk"}
    database.add("expert_switches", **switch, loaded="line@50e527a8f71d", load_ms=9.0, cause="startup")
    query = "SELECT expert, images, batches, mean_batch, loads FROM expert_usage ORDER BY expert"
    assert database.sql(query) == [
        ("C0603", 1, 1, 1.0, 0),
        ("R0402", 4, 2, 2.0, 0),
        ("line@50e527a8f71d", 5, 2, 2.5, 1),
    ]


def test_false_calls_and_escapes_follow_the_newest_review(database):
    board = database.board("S")
    fail = [database.image(board, "fail", "R") for _ in range(3)]
    good = [database.image(board, "pass", "R") for _ in range(2)]
    database.image(board, "fail", "Q")
    database.add_review(fail[0], "pass")
    database.add_review(fail[1], "pass")
    database.add_review(fail[1], "fail")
    database.add_review(good[0], "fail")
    database.add_review(good[1], "fail")
    database.add_review(good[1], "pass")
    database.add_review(database.image(board, "review", "Q"), "pass")
    assert database.sql("SELECT * FROM false_calls ORDER BY component") == [("Q", 0, 0, 1), ("R", 1, 1, 4)]


def test_final_verdicts_are_the_newest_reviewers_or_the_daemons(database):
    board = database.board("S")
    plain = database.image(board, "fail", defect="D1")
    turned = database.image(board, "fail", defect="D1")
    database.image(board, None)
    database.add_review(turned, "fail", "anna", defect="D2")
    database.add_review(turned, "pass", "bert")
    assert database.sql("SELECT * FROM final_verdicts ORDER BY inspection_id") == [
        (plain, "fail", "D1", "daemon"),
        (turned, "pass", None, "bert"),
    ]
