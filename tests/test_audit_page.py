"""docs/results.md, "An audit": each command runs as printed, on a line that judged, and shows what the page says."""

import re
import shlex
import shutil
import sqlite3
from contextlib import chdir, closing
from pathlib import Path

import pytest

from tests import ROOT
from tests.tools.query.judged_line import judged_line
from tests.tools.run_commands import coserve

PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").partition("\n## An audit")[2]
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("coserve ")]
#: The returned board of the tests' line.
SERIAL = "S2"
#: Words of an output that differ from line to line.
_VARIES = re.compile(r"[0-9a-f]{12}|[0-9a-f]{4}( [0-9a-f]{4}){3}|\d{4}-\d\d-\d\dT[\d:.+Z]+|sqlite:\S+|\d+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    judged_line(folder / "demo", experts_folder)
    return folder


def run(folder: Path, command: str, status: int = 0) -> str:
    words = shlex.split(command.replace("D1-003", SERIAL))
    with chdir(folder):
        return coserve(*words[1:], status=status, COLUMNS="200").stdout


def test_each_command_of_the_drill_runs_and_shows_what_the_page_says(folder: Path) -> None:
    outputs = {command: run(folder, command) for command in COMMANDS}
    assert len(outputs) == 12
    shown = _VARIES.sub("#", "\n".join(outputs.values()).replace(SERIAL, "D1-003"))
    for block in BLOCKS:
        lines = [line for line in block.splitlines() if not line.startswith(("coserve ", "│", "audit/nightly: stages"))]
        for line in lines:
            expected = _VARIES.sub("#", line).replace("signed by root", "signed by ")
            assert expected.split("signed by ")[-1] in shown, line
    for name in ("serial", "attempt", "daemon_verdict", "decided_by"):
        assert name in outputs[COMMANDS[2]]


def test_the_drill_names_what_was_changed_after_signing(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "demo", tmp_path / "demo", ignore=shutil.ignore_patterns("run"))
    make, export, *_, compare = [line for line in COMMANDS if "quality" in line and "D1-003" not in line]
    run(tmp_path, make)
    run(tmp_path, export)
    with closing(sqlite3.connect(tmp_path / "demo" / "inspection.db", isolation_level=None)) as database:
        database.execute("UPDATE stages SET confidence = 0.91 WHERE inspection_id = 56 AND step = 0")
    named = "audit/nightly: stages 56 0: confidence is 0.91 in the database, 0.9 in the package"
    assert named in PAGE
    assert named in run(tmp_path, compare, status=1).splitlines()
