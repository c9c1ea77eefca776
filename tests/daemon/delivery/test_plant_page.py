"""docs/plant.md: its configuration is one, and its consumer is a program that works."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import ROOT
from tests.daemon.delivery.results_database import ResultsDatabase
from tests.waiting import PATIENCE_S

PAGE = (ROOT / "docs/plant.md").read_text(encoding="utf-8")
LINE = "rules: rules.yaml\ncatalog: catalog.yaml\ndevices: {cpu: {expert_memory: 1GB}}\n"


def block(language: str) -> str:
    match = re.search(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert match
    return match[1]


def test_the_consumer_of_the_page_writes_every_board_across_a_kill(tmp_path: Path) -> None:
    program, out = tmp_path / "board_log.py", tmp_path / "boards.csv"
    program.write_text(block("python"), encoding="utf-8")
    (tmp_path / "coserve.yaml").write_text(LINE, encoding="utf-8")
    database = ResultsDatabase(tmp_path / "inspection.db")
    total = 0
    for number in (signal.SIGKILL, signal.SIGTERM):
        total = database.grow(500, 'S"{},;\n')
        process = subprocess.Popen(
            [sys.executable, str(program), str(tmp_path / "coserve.yaml"), str(out)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        until_s = time.monotonic() + PATIENCE_S
        while not out.exists() or f"\n{total}," not in out.read_text(encoding="utf-8"):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) in (0, -signal.SIGKILL)
    with out.open(newline="", encoding="utf-8") as file:
        rows = {int(row[0]): row for row in csv.reader(file)}
    assert set(rows) == set(range(3, total + 1, 3))
    assert rows[3][2:] == ["pair", 'S"1,;\n', "pass"]
    assert (tmp_path / "board-log.position").exists()
