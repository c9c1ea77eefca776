"""A serial is found by an index, among any number of boards."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from daemon.plant.page import questions
from tests.daemon.consumers.plant.hub_database import HubDatabase
from tests.daemon.storage.database.postgresql_server import WANTED, Server, programs

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = pytest.mark.skipif(programs() is None, reason=WANTED)

#: One a minute on forty whole days.
BOARDS, LINES = 40 * 1440, 6
_AT = "date_trunc('day', now(), 'UTC') - n * interval '1 minute'"
_FILL = f"""
    INSERT INTO lines (line, epoch, identity, host, last_seq)
    SELECT 'line-' || line, 'e', 'i' || line, 'h', {BOARDS} FROM generate_series(1, {LINES}) AS line;
    INSERT INTO boards (line, epoch, seq, at, board_type, board_serial, attempt, verdict, final_verdict, expected,
        inspected, failed, review, unknown, missing)
    SELECT 'line-' || n % {LINES} + 1, 'e', n, {_AT}, 'a', 'S' || 1000000 + n, 1, 'pass',
        'pass', 9, 9, '[]', '[]', '[]', '[]'
    FROM generate_series(1, {BOARDS}) AS n;
    INSERT INTO inspections (line, epoch, seq, at, inspection_id, image_id, source, board_type, board_serial, attempt,
        component, verdict, late, stages, rules_version)
    SELECT 'line-' || n % {LINES} + 1, 'e', n, {_AT}, n, n, 'c', 'a', 'S' || 1000000 + n,
        1, 'R', 'fail', false, '[]', 'r'
    FROM generate_series(1, {BOARDS}) AS n;
    INSERT INTO reviews (line, epoch, seq, at, review_id, inspection_id, board_type, board_serial, attempt, verdict,
        reviewer)
    SELECT line, epoch, seq + {BOARDS}, at, seq, inspection_id, board_type, board_serial, 1, 'pass', 'Eva'
    FROM inspections;
    ANALYZE
"""  # noqa: S608 - numbers of our own


@pytest.fixture(scope="module")
def hub(postgresql: Server) -> Iterator[HubDatabase]:
    hub = HubDatabase(postgresql, "serials")
    hub.ask("SELECT ensure_day(current_date - day) FROM generate_series(0, 45) AS day")
    for statement in _FILL.split(";"):
        hub.ask(statement)
    yield hub
    hub.engine.dispose()


class Explained:
    """A database that shows the plan of each question."""

    def __init__(self, hub: HubDatabase) -> None:
        self.hub = hub
        self.plans: list[Any] = []

    def rows(self, question: str, values: Any = None, limit: int = 0) -> list[Any]:
        with self.hub.engine.connect() as connection:
            from sqlalchemy import text

            plan = connection.execute(text(f"EXPLAIN (ANALYZE, FORMAT JSON) {question}"), values or {}).scalar()
            self.plans += plan if isinstance(plan, list) else json.loads(plan)
            return list(connection.execute(text(question), values or {}).all())


def nodes(plan: Any) -> Iterator[dict[str, Any]]:
    yield plan
    for inner in plan.get("Plans", ()):
        yield from nodes(inner)


def scanned_whole(plans: list[Any]) -> set[str]:
    """The tables that were read from their beginning; those with a few rows, or none, do not count."""
    scans = (node for plan in plans for node in nodes(plan["Plan"]) if node["Node Type"] == "Seq Scan")
    return {node["Relation Name"] for node in scans if node["Actual Rows"] + node.get("Rows Removed by Filter", 0) > 20}


def rows_read(plans: list[Any]) -> int:
    """The rows that scans touched: those that they returned and those that they threw away."""
    touched = 0
    for plan in plans:
        for node in nodes(plan["Plan"]):
            if "Scan" in node["Node Type"]:
                loops = node["Actual Loops"]
                touched += loops * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
    return touched


@pytest.mark.parametrize(("serial", "found"), [("S1012345", 1), ("S101234", 10), ("S2", 0), ("S10123", 100)])
def test_a_serial_or_its_beginning_is_found_without_a_whole_scan(hub: HubDatabase, serial: str, found: int) -> None:
    database: Any = Explained(hub)
    boards = questions.find_boards(database, serial, "")
    assert len(boards) == found
    assert [board.board_serial for board in boards] == sorted(board.board_serial for board in boards)  # newest first
    assert not scanned_whole(database.plans)
    assert rows_read(database.plans) < BOARDS / 5  # of the scans of six lines, each with its decisions


def test_a_serials_way_reads_its_own_rows_only(hub: HubDatabase) -> None:
    database: Any = Explained(hub)
    ((board, findings, decisions),) = questions.board_attempts(database, "a", "S1012345")
    assert (board.decided_by, len(findings), len(decisions)) == ("Eva", 1, 1)
    assert not scanned_whole(database.plans)
    assert rows_read(database.plans) < 200
