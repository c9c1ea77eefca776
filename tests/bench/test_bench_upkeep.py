"""The benchmark of the database's upkeep, small: everything runs, and images are accepted meanwhile."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.test_all


def test_images_are_accepted_through_every_kind_of_upkeep(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools", "bench", "upkeep", "--rows", "2000", "--seconds", "0.5", "--json"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode in (0, 1), done.stderr  # 1: this machine is busy with something else
    measured = {row["upkeep"]: row for row in json.loads(done.stdout)["upkeep"]}
    assert all(row["images"] > 0 for row in measured.values())
    assert measured["check"]["note"] == "all well"
    assert measured["pruning images"]["note"] == "200 images"
    assert measured["pruning half of the results"]["note"] in ("900 inspections", "1,000 inspections")
    assert list(tmp_path.iterdir()) == []
