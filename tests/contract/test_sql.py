"""RESULTS.md against the database that a running daemon wrote, through a stock sqlite3 and nothing else.

`test_results_sql.py` holds the schema and the views over rows made by hand; here the rows are the daemon's own.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import RULES, Line, sha256
from tests.lines import a_jpeg

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
TIMES = {
    "boards": ("first_seen_at", "completed_at"),
    "inspections": ("captured_at", "accepted_at", "completed_at"),
    "expert_switches": ("at",),
    "rules_versions": ("loaded_at",),
    "expert_versions": ("first_used_at",),
}
#: What is sent: board serial, component, designator, further fields. The rules give P pass, V review and F fail.
SENT: list[tuple[str, str, str, dict[str, Any]]] = [
    ("A", "P", "P1", {}),
    ("A", "P", "P2", {}),
    ("A", "F", "F1", {}),
    ("B", "P", "P1", {}),
    ("B", "P", "P2", {"deadline_ms": 1}),
    ("B", "F", "F1", {}),
    ("A", "P", "P1", {}),
]
MORE_RULES = RULES.replace("boards:\n", "boards:\n  mixed: {extras: allow, components: {P: 1, V: 1}}\n")


class Database:
    """The line's file and its database, after everything was judged and the daemon has stopped."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.ids: list[str] = []
        self.streamed: list[dict[str, Any]] = []
        self.status: dict[str, Any] = {}

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self.line.rows(sql)

    def one(self, sql: str) -> tuple[Any, ...]:
        (row,) = self.rows(sql)
        return row


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Database:
    """Two `named` boards, the first twice; one `mixed` board; reviews; memory for three of four experts."""
    line = Line(tmp_path_factory.mktemp("sql") / "line", experts_folder, rules=MORE_RULES, memory="100MB")
    database = Database(line)
    with line.service():
        for serial, component, designator, more in SENT:
            board = {"type": "named", "serial": serial, "lot": "L1", "station": "ST"}
            image_id = line.send(board=board, component=component, designator=designator, **more)
            database.ids.append(image_id)
            line.result(image_id)
        for component in "PV":
            image_id = line.send(board={"type": "mixed", "serial": "M"}, component=component)
            database.ids.append(image_id)
            line.result(image_id)
        raw = {"encoding": "raw", "dtype": "uint8", "shape": [8, 8, 1]}
        database.ids.append(line.send(bytes(64), component="V", captured_at="2026-11-21T10:00:00+02:00", **raw))
        line.result(database.ids[-1])
        line.write_rules(MORE_RULES + "# a remark\n")
        assert line.control("reload")["type"] == "ok"
        waiting = "SELECT count(*) FROM inspections WHERE verdict <> 'pass' AND image_path IS NULL"
        line.wait(lambda: line.rows(waiting) == [(0,)])
        database.status = line.status()
        database.streamed = line.stream()
    return database


def test_every_image_has_one_row_with_what_was_sent(database: Database) -> None:
    rows = database.rows(
        "SELECT image_id, source, board_type, serial, attempt, component, designator, status, late, image_bytes,"
        " image_sha256, deadline_ms FROM inspections JOIN boards USING (board_id) ORDER BY inspection_id"
    )
    assert [row[0] for row in rows] == database.ids
    attempts = [1, 1, 1, 1, 1, 1, 2]
    for number, (serial, component, designator, more) in enumerate(SENT):
        payload = a_jpeg(number + 1)
        assert rows[number][1:] == (
            *("cam-1", "named", serial, attempts[number], component, designator, "done", 0),
            *(len(payload), sha256(payload), more.get("deadline_ms")),
        )
    assert rows[-1][-3:] == (64, sha256(bytes(64)), None)
    assert database.one("SELECT captured_at FROM inspections ORDER BY inspection_id DESC LIMIT 1") == (
        "2026-11-21T08:00:00.000Z",
    )


def test_verdicts_and_boards_are_those_of_the_stream(database: Database) -> None:
    images = [m for m in database.streamed if "id" in m]
    stored = database.rows(
        "SELECT seq, completed_at, image_id, verdict, defect, reason, latency_ms, rules_version FROM inspections"
        " ORDER BY seq"
    )
    names = ("seq", "at", "id", "verdict", "defect", "reason", "latency_ms", "rules_version")
    assert stored == [tuple(message[name] for name in names) for message in images]
    boards = [m for m in database.streamed if "id" not in m]
    stored = database.rows(
        "SELECT seq, completed_at, serial, attempt, verdict, reason, expected, inspected FROM boards"
        " WHERE seq IS NOT NULL ORDER BY seq"
    )
    assert stored == [
        (m["seq"], m["at"], m["board"]["serial"], m["board"]["attempt"], m["verdict"], m["reason"], m["expected"],
         m["inspected"])
        for m in boards
    ]  # fmt: skip
    open_boards = "SELECT serial, attempt, completed_at, verdict, reason, lot FROM boards WHERE seq IS NULL"
    assert database.rows(open_boards) == [("A", 2, None, None, None, "L1"), ("S1", 1, None, None, None, None)]


def test_stages_say_who_answered(database: Database) -> None:
    by_component = dict(
        database.rows(
            "SELECT component, group_concat(expert, '>') FROM (SELECT * FROM stages ORDER BY inspection_id, step)"
            " JOIN inspections USING (inspection_id) GROUP BY component, inspection_id"
        )
    )
    assert by_component == {"P": "R0402", "V": "C0603", "F": "QFP64>yolo-solder"}
    assert database.rows(
        "SELECT count(*) FROM stages WHERE device <> 'cpu' OR executor <> 'cpu/0' OR batch_size < 1 OR queued_ms < 0"
        " OR load_ms < 0 OR infer_ms <= 0 OR step NOT IN (0, 1)"
    ) == [(0,)]
    unanswered = "SELECT i.reason FROM inspections i LEFT JOIN stages USING (inspection_id) WHERE step IS NULL"
    assert database.rows(unanswered) == [("deadline",)]


def test_experts_and_rules_are_recorded_with_their_versions(database: Database) -> None:
    line = database.line
    used = database.rows("SELECT DISTINCT expert, expert_version FROM stages ORDER BY expert")
    recorded = database.rows("SELECT expert, expert_version, sha256, classes, bytes, dtype FROM expert_versions")
    assert sorted(row[:2] for row in recorded) == used
    for expert, version, digest, classes, size, dtype in recorded:
        file = line.weights(expert).read_bytes()
        assert hashlib.sha256(file).hexdigest() == digest
        assert digest[:12] == version
        assert isinstance(json.loads(classes), list)
        assert (dtype, size <= len(file)) == ("float32", True)
    rules = database.rows("SELECT rules_version, sha256, text FROM rules_versions ORDER BY loaded_at")
    assert [text for _, _, text in rules] == [MORE_RULES, MORE_RULES + "# a remark\n"]
    for version, digest, text in rules:
        assert hashlib.sha256(text.encode()).hexdigest() == digest
        assert digest[:12] == version
    assert rules[-1][0] == database.status["rules_version"]


def test_switches_are_loads_that_the_status_counts_but_for_the_startup(database: Database) -> None:
    switches = database.rows("SELECT loaded, evicted, bytes, load_ms, tier, cause, device FROM expert_switches")
    assert sum(cause != "startup" for *_, cause, _ in switches) == database.status["expert_switches"] > 0
    assert any(cause == "startup" for *_, cause, _ in switches)
    resident: set[str] = set()
    for loaded, evicted, size, load_ms, tier, _, device in switches:
        gone = set(json.loads(evicted))
        assert gone <= resident
        resident = (resident - gone) | {loaded}
        assert (size > 0, load_ms > 0, tier in {"ram", "disk"}, device) == (True, True, True, "cpu")


def test_images_that_stay_are_files_with_the_bytes_that_were_sent(database: Database) -> None:
    images = database.rows("SELECT image_path, image_sha256, verdict FROM inspections WHERE image_path IS NOT NULL")
    assert {verdict for _, _, verdict in images} == {"pass", "fail", "review", "unknown"}
    examples = "SELECT count(image_path) FROM inspections WHERE verdict = 'pass' GROUP BY component"
    assert {count for (count,) in database.rows(examples)} <= {1, 2, 3}, "retention.good_examples"
    for path, digest, _ in images:
        data = (database.line.folder / path).read_bytes()
        assert sha256(data[-64:] if path.endswith(".pgm") else data) == digest
        assert (database.line.folder / path).stat().st_mode & 0o777 == 0o640


def test_times_are_utc_text_with_milliseconds_and_in_order(database: Database) -> None:
    for table, columns in TIMES.items():
        for column in columns:
            values = database.rows(f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL")  # noqa: S608
            assert values, (table, column)
            assert all(TIME.fullmatch(value) for (value,) in values), (table, column)
    assert database.one("SELECT count(*) FROM inspections WHERE completed_at < accepted_at") == (0,)
    assert (database.rows("PRAGMA foreign_key_check"), database.one("PRAGMA journal_mode")) == ([], ("wal",))
