"""Every command that is given a serial finds its boards by the index, however many others there are."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event
from typer.testing import CliRunner

from tests.tools.query.asked_database import make
from tools.cli.main import app

CONFIG = """\
endpoints: {intake: ["ipc://run/i.sock"], results: "ipc://run/r.sock", control: "ipc://run/c.sock"}
rules: rules.yaml
catalog: catalog.yaml
devices: {cpu: {expert_memory: 100MB}}
"""
SERIAL = "S0000051"


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, and a database of 200 boards behind ten thousand older ones."""
    folder = tmp_path_factory.mktemp("serials")
    (folder / "coserve.yaml").write_text(CONFIG, encoding="utf-8")
    make(folder / "inspection.db", boards=200)
    with closing(sqlite3.connect(folder / "inspection.db")) as database, database:
        database.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1000 UNION ALL SELECT i + 1 FROM n WHERE i < 11000) INSERT INTO boards"
            " (board_id, board_type, serial, attempt, lot, first_seen_at, completed_at, expected, verdict, reason,"
            " rules_version, seq) SELECT i, 'old', 'OLD-' || i, 1, 'L0', '2025', '2025', 1, 'pass', 'complete', '0',"
            " 10000000 + i FROM n"
        )
        database.execute("ANALYZE")
    return folder


@pytest.fixture
def asked() -> Iterator[list[tuple[str, Any]]]:
    """Every question that is put to a database meanwhile, with its values."""
    found: list[tuple[str, Any]] = []

    def see(_connection: Any, _cursor: Any, statement: str, values: Any, _context: Any, _is_many: bool) -> None:
        found.append((statement, values))

    event.listen(Engine, "before_cursor_execute", see)
    yield found
    event.remove(Engine, "before_cursor_execute", see)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("results", "--serial", SERIAL, "--count"), "42"),
        (("results", "--serial", SERIAL, "--serial", "S0000052", "--csv"), SERIAL),
        (("results", "--serial", SERIAL, "--stages", "--csv"), SERIAL),
        (("results", "--serial", SERIAL, "--boards", "--csv"), SERIAL),
        (("results", "--serial", SERIAL, "--boards", "--order", "attempt", "--limit", "5", "--csv"), SERIAL),
        (("explain", SERIAL), "is a board, not an image"),
        (("explain", SERIAL, "R1"), f"board {SERIAL}"),
        (("report", SERIAL), f"Board {SERIAL}"),
        (("export", "--serial", SERIAL, "--out", "OUT"), "1 board"),
    ],
)
def test_no_command_walks_through_all_boards_for_a_serial(
    line: Path, tmp_path: Path, asked: list[tuple[str, Any]], command: tuple[str, ...], said: str
) -> None:
    name, *rest = (str(tmp_path / "out") if word == "OUT" else word for word in command)
    config = ["--config", str(line / "coserve.yaml")]
    done = CliRunner().invoke(app, [name, *rest, *config])
    assert said in done.output
    with closing(sqlite3.connect(line / "inspection.db")) as database:
        plans = [
            row[3]
            for statement, values in asked
            if "boards" in statement
            for row in database.execute(f"EXPLAIN QUERY PLAN {statement}", values)
        ]
    assert any("INDEX ix_boards_serial (<expr>=?" in step for step in plans), plans
    assert not any(step.startswith("SCAN boards") for step in plans), plans
