"""The ten questions of docs/plant.md on a real PostgreSQL, about a few boards whose answers can be seen."""

import re
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Connection

from tests import ROOT
from tests.daemon.plant.page.plant_rows import PlantRows, filled, utc_now
from tests.daemon.storage.database.postgresql_server import WANTED, Server, programs

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = pytest.mark.skipif(programs() is None, reason=WANTED)

PAGE = (ROOT / "docs/plant.md").read_text(encoding="utf-8")
QUESTIONS = {
    int(number): sql for number, sql in re.findall(r"^### (\d+)\.[^`]*```sql\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
}


def some_boards() -> PlantRows:
    """A false call (A2) and an escape (A1 at line-2), a board on two lines, one healed by a retest, one made worse."""
    plant = PlantRows(utc_now())

    def board(line: str, serial: str, hours: float, **more: Any) -> dict[str, Any]:
        verdicts = {name: more.pop(name) for name in ("R1", "C1", "U1") if name in more}
        return plant.board(line, serial, verdicts, timedelta(hours=hours), **more)

    board("line-1", "A1", 2, R1="pass", U1="pass")
    plant.review(board("line-1", "A2", 5, R1="fail", U1="pass"), "R1", "pass")
    board("line-1", "A2", 4, R1="pass", attempt=2)
    board("line-1", "S1", 3, R1="unknown", board_type="sensor", lot=None)
    board("line-1", "A4", 7, R1="pass", C1="fail")
    board("line-1", "A0", 9 * 24, R1="fail", lot="L0")
    board("line-3", "B0", 9 * 24, R1="pass")
    plant.review(board("line-2", "A1", 30, U1="pass", lot="L2"), "U1", "fail", "Ali")
    board("line-2", "A1", 29, U1="fail", lot="L2", attempt=2)
    plant.review(board("line-2", "A3", 6, R1="pass", C1="fail", version="v2"), "C1", "fail")
    return plant


ANSWERS: dict[int, list[tuple[Any, ...]]] = {
    1: [("line-1", 8, 4, 0.25, 0.5), ("line-2", 4, 2, 0.5, 0)],
    2: [("mainboard-a", "line-2", 2, 0.5, 1), ("mainboard-a", "line-1", 3, 0.333, 2), ("sensor", "line-1", 1, 0, 1)],
    3: [("missing", "C0603", 2, 2, 0.5), ("bridge", "QFP64", 1, 1, 0.25), ("tombstone", "R0402", 1, 1, 0.25)],
    4: [("L1", "line-1", 3, 0.667), ("L1", "line-2", 1, 1), ("L2", "line-2", 1, 0)],
    5: [("mainboard-a", "A1", "line-2: fail, line-2: fail, line-1: pass")],
    6: [("line-1", 1, 1, 0), ("line-2", 1, 0, 1)],
    7: [("line-1", 1, 1, 0), ("line-2", 2, 0, 1)],
    8: [("Ali", "line-2", 1, 0, 1), ("Eva", "line-1", 1, 1, 1), ("Eva", "line-2", 1, 0, 0)],
    9: [
        *(("C0603", "v1", "line-1", 1, 1, 0), ("C0603", "v2", "line-2", 1, 1, 0)),
        *(("QFP64", "v1", "line-1", 2, 0, 0), ("QFP64", "v1", "line-2", 2, 0.5, 0)),
        *(("R0402", "v1", "line-1", 5, 0.2, 0.2), ("R0402", "v2", "line-2", 1, 0, 0)),
    ],
    10: [("line-3", "line-3-pc", None, 2, None), ("line-2", "line-2-pc", 9, None)],  # without the time, which passes
}


@pytest.fixture(scope="module")
def connection(postgresql: Server) -> Iterator[Connection]:
    plant = some_boards()
    seen = {"line-1": plant.now + timedelta(hours=1), "line-2": plant.now - timedelta(hours=3), "line-3": None}
    with filled(postgresql.url("cookbook"), plant, seen) as engine, engine.connect() as connection:
        yield connection


@pytest.mark.parametrize("number", range(1, 11))
def test_a_question_of_the_page_has_the_answer_that_can_be_seen(number: int, connection: Connection) -> None:
    rows = connection.exec_driver_sql(QUESTIONS[number])
    values = [[float(value) if isinstance(value, Decimal) else value for value in row] for row in rows]
    assert [tuple(value for value in row if not isinstance(value, timedelta)) for row in values] == ANSWERS[number]
