"""Tables and sentences for people: whole words and numbers at 80 columns, and times of the plant's clock."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from tests.daemon.dashboard.web import Web
from tests.tools.run_commands import coserve

HASHES = ("7b4b65127586", "1f18b95d7815")


@pytest.fixture
def line(tmp_path: Path) -> Web:
    """A line in Berlin with a board of one image that failed, and changes of it."""
    web = Web(tmp_path / "line")
    settings = yaml.safe_load(web.config.read_text(encoding="utf-8"))
    web.config.write_text(yaml.safe_dump({**settings, "plant": {"timezone": "Europe/Berlin"}}), encoding="utf-8")
    web.add_board(1, "D1-017", "fail")
    web.add_image(1, 1, "fail", defect="D207", completed_at="2026-11-25T09:44:51.394Z")
    rows = [
        ("root", "reload", "settings of yolo-solder", *HASHES, "temperature 0.4 → 0.7: after the audit"),
        ("root", "start", "CoServe", None, "0.1.0", None),
    ]
    with closing(sqlite3.connect(web.database)) as database, database:
        database.executemany(
            "INSERT INTO changes (at, who, what, subject, old, new, note)"
            " VALUES ('2026-11-25T09:44:51.394Z', ?, ?, ?, ?, ?, ?)",
            rows,
        )
    return web


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (
            ["results"],
            ["times of Europe/Berlin", "│ 11-25 10:44:51 │", "│ fail    │", "│ D1-017 │"],
        ),
        (["review", "--list"], ["times of Europe/Berlin", "│ 11-25 10:44:51 │", "│ D1-017 #1 │", "│ D207   │"]),
        (["changes"], ["times of Europe/Berlin", "│ 11-25 10:44:51 │", f"{HASHES[0]} →", HASHES[1], "│ start  │"]),
    ],
)
def test_tables_break_no_word_at_80_columns_and_show_the_plants_time(line: Web, command: list[str], parts: list[str]):
    shown = coserve(*command, "--config", line.config, COLUMNS="80").stdout
    assert all(len(text) <= 80 for text in shown.splitlines() if text[0] in "┏┃┡│└")
    assert [part for part in parts if part not in shown] == [], shown


def test_sentences_show_the_plants_time(line: Web) -> None:
    line.add_review(1, "pass", reviewer="Ben")
    assert "decided by Ben at 2026-11-21 10:28:11 CET" in coserve("report", "D1-017", "--config", line.config).stdout
    explained = coserve("explain", "D1-017", "R1", "--config", line.config).stdout
    assert "verdict 2026-11-25 10:44:51 CET" in explained
    refused = coserve("review", 1, "fail", "--config", line.config, status=1).stderr
    assert "Ben decided pass at 2026-11-21 10:28:11 CET" in refused
