"""`coserve bench online`: the simulated table, and the live one with experts of a few megabytes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.bench.arrivals import OnlineSettings, live_rows
from tests.bench.job import Job, Run
from tests.bench.online import POLICIES
from tests.bench.stage import Size
from tests.bench.test_bench_live import RECIPE, a_run, a_stage, job, stock  # noqa: F401  fixtures
from tests.tools.simulate.test_simulate import a_device, a_task
from tools.cli.main import app


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
def test_wrong_use_is_said_before_anything_is_made(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", "online", *arguments])
    assert done.exit_code == 2


def test_live_rows_are_of_runs_with_and_without_deadlines(job: Job, tmp_path: Path) -> None:  # noqa: F811
    made: list[Job] = []

    def run(one: Job) -> Run:
        made.append(one)
        images = len(one.trace.asks)
        if one.deadline_s is None:
            return a_run(one.side, images, seconds=images / 10.0)
        return a_run(one.side, images - 4, unknown=2)

    size = Size(RECIPE, requests=24, memory_share=0.5, executors=2, threads=2, limit_s=5.0)
    settings = OnlineSettings(tmp_path, size, (0.9,), 3.0)
    saturated, rows = live_rows(a_stage(job, tmp_path), settings, POLICIES, run)
    assert saturated == {"poisson": 10.0, "bursty": 10.0}
    assert [(row.arrivals, row.policy) for row in rows] == [
        (kind, policy) for kind in ("poisson", "bursty") for policy in POLICIES
    ]
    assert all((row.unknown_share, row.finished) == (0.25, 1.0) for row in rows)
    assert sum(one.deadline_s == 3.0 for one in made) == 6
    assert sum(one.trace.order == "board" for one in made) == 7
