import json

import pytest
from typer.testing import CliRunner

from tools.cli.main import app

pytestmark = pytest.mark.test_all


def test_a_line_is_measured_with_and_without_a_shadow() -> None:
    done = CliRunner().invoke(app, ["bench", "shadow", "--images", "50", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout[done.stdout.index("{") :])
    runs = {name: run for name, (run,) in figures["runs"].items()}
    assert all(run["images_per_s"] > 0 and run["p50_ms"] <= run["p99_ms"] for run in runs.values())
    assert {name: run["shadowed"] > 0 for name, run in runs.items() if "without" in name} == {
        "saturated, without": False,
        "60%, without": False,
    }
    assert figures["ratios"].keys() == {
        f"{load} {figure}" for load in ("saturated", "60%") for figure in ("images_per_s", "p50_ms", "p99_ms")
    }
