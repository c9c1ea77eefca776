"""`make demo`, as a user runs it: shipped experts, a daemon, a camera, verdicts beside the truth."""

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import cv2
import pytest

from tests.tools.query.cookbook_questions import ask, ask_the_shell, questions
from tests.tools.run_commands import coserve, start_coserve

#: A user gets twenty.
BOARDS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("line") / "demo"


@pytest.fixture(scope="module")
def shown(folder: Path) -> str:
    """Output of the demo, run on its own sockets."""
    run = folder / "run"
    environ = {
        "COSERVE_ENDPOINTS_INTAKE": f"[ipc://{run}/intake.sock]",
        "COSERVE_ENDPOINTS_RESULTS": f"ipc://{run}/results.sock",
        "COSERVE_ENDPOINTS_HTTP": "null",
    }
    done = start_coserve("demo", "--dir", folder, "--boards", BOARDS, env=os.environ | environ, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_judges_every_image_and_shows_verdicts_truth_and_questions(folder: Path, shown: str) -> None:
    coserve("check", folder / "coserve.yaml")
    for words in ("What was rendered, and what the line says", "good boards", "results --verdict fail", "Next:"):
        assert words in shown
    assert len(shown.splitlines()) <= 30, "one screen"
    pictures = sorted((folder / "boards").glob("*.png"))
    assert len(pictures) == BOARDS
    assert cv2.imread(str(pictures[0])).shape[0] > 600
    with closing(sqlite3.connect(f"file:{folder}/inspection.db?mode=ro", uri=True)) as database:
        boards = database.execute("SELECT count(*), count(verdict), min(reason), max(reason) FROM boards").fetchone()
        assert boards == (BOARDS, BOARDS, "complete", "complete")
        unjudged = database.execute("SELECT count(*) FROM inspections WHERE verdict IS NULL OR verdict = 'unknown'")
        assert unjudged.fetchone() == (0,)
        switched = database.execute("SELECT DISTINCT loaded FROM expert_switches WHERE cause <> 'startup'").fetchall()
    names = {name.partition("@")[0] for (name,) in switched}
    assert names, "the budget holds not all of them"
    assert names <= {"parts", "solder-chip", "solder-leaded"}


def test_most_good_boards_pass_and_defects_are_found(shown: str) -> None:
    rows = {line.split("│")[1].strip(): line for line in shown.splitlines() if line.startswith("│")}
    good_boards, good_parts = (list(map(int, re.findall(r"\d+", rows[name]))) for name in ("good boards", "good parts"))
    assert good_boards[0] / sum(good_boards) >= 0.8
    assert good_parts[0] / sum(good_parts) >= 0.99


def test_the_sql_cookbook_runs_on_the_database_of_the_demo(folder: Path, shown: str) -> None:
    database = folder / "inspection.db"
    # There are no reviews, no image was late or missing, every board came once, and these boards are too few
    # for places that fail more than others.
    silent = {5, 13, 15, 17, 18, 19}
    for question in questions():
        answer = ask(database, question.sql)
        assert answer or question.number in silent | {9}, question.title
        ask_the_shell(database, question.sql)
