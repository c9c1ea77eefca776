"""`coserve bench online`: the simulated table, and the live one on runs that were made up."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.bench.live.sides import LiveSetup, SideInput, SideResult
from tests.bench.live.test_bench_live import a_result, catalog, setup, thin_catalog  # noqa: F401  fixtures
from tests.bench.online import POLICIES, live_rows
from tests.tools.simulate.test_simulate import a_device, a_task
from tools.cli.main import app

pytestmark = pytest.mark.test_all


def test_the_simulated_table_has_a_row_for_each_policy_load_and_kind_of_arrivals(tmp_path: Path) -> None:
    for name, content in (("device", a_device()), ("task", a_task())):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    files = ["--device", str(tmp_path / "device.json"), "--task", str(tmp_path / "task.json")]
    done = CliRunner().invoke(
        app, ["bench", "online", *files, "--loads", ".5,.9", "--json", str(tmp_path / "out.json")]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["arrivals"], row["load"], row["policy"]) for row in rows] == [
        (kind, load, policy) for kind in ("poisson", "bursty") for load in (0.5, 0.9) for policy in POLICIES
    ]
    assert all(0 < row["p50_s"] <= row["p95_s"] <= row["p99_s"] for row in rows)


@pytest.mark.parametrize(
    "arguments",
    [["--task", "t.json"], ["--device", "d.json"], ["--live", "--loads", "much"], ["--live", "--loads", "-1"]],
)
def test_wrong_use_is_told_before_anything_is_made(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", "online", *arguments]).exit_code == 2


def test_live_rows_are_of_runs_with_and_without_deadlines(setup: LiveSetup) -> None:  # noqa: F811
    runs: list[SideInput] = []

    def run(work: SideInput) -> SideResult:
        runs.append(work)
        images = len(work.trace.images)
        if work.deadline_s is None:
            return a_result(work.side, images, seconds=images / 10.0)
        return a_result(work.side, images - 4, unknown=2)

    setup = replace(setup, options=replace(setup.options, limit_s=5.0))
    saturated, rows = live_rows(setup, (0.9,), 3.0, run)
    assert saturated == {"poisson": 10.0, "bursty": 10.0}
    assert [(row["arrivals"], row["policy"]) for row in rows] == [
        (kind, policy) for kind in ("poisson", "bursty") for policy in POLICIES
    ]
    assert all((row["unknown_share"], row["finished"]) == (0.25, 1.0) for row in rows)
    assert sum(work.deadline_s == 3.0 for work in runs) == 6
    assert sum(work.trace.order == "board" for work in runs) == 7
