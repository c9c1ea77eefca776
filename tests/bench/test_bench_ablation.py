"""`coserve bench ablation`: the bound that no policy can beat, and the table."""

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.bench.ablation import attainable_s
from tests.tools.simulate.test_simulate import a_device, a_task
from tools.cli.main import app
from tools.simulate.bound import task_bound
from tools.simulate.files import DeviceFile, TaskFile
from tools.simulate.world import machine_of, task_of

pytestmark = pytest.mark.test_all


def test_experts_whose_images_come_late_are_read_late() -> None:
    task_file = a_task()
    names = [expert["id"] for expert in task_file["experts"]]
    task_file["requests"] = [[n * 0.001, name, None] for n, name in enumerate(names)]
    task_file["requests"] += [[1000.0 + n * 0.001, name, None] for n, name in enumerate(names)]
    task = task_of(TaskFile.model_validate(task_file))
    machine = machine_of(DeviceFile.model_validate(a_device()), task, "coserve-plus", "slots")
    expert_bytes = sum(facts.weights_bytes for facts in task.experts)
    missing_bytes = expert_bytes - sum(facts.budget_bytes for facts in machine.pools)
    assert missing_bytes > 0
    disk = machine.from_disk["cpu"][0]
    assert attainable_s(machine, task) >= 1000.0 + missing_bytes / disk.bytes_per_s
    assert attainable_s(machine, task) > task_bound(machine, task).seconds


def test_each_policy_has_a_row_for_each_scenario_way_of_loading_and_load(tmp_path: Path) -> None:
    (tmp_path / "device-numa.json").write_text(json.dumps(a_device()))
    for name in ("A1", "A1-board"):
        (tmp_path / f"task-{name}.json.gz").write_bytes(gzip.compress(json.dumps(a_task()).encode()))
    policies = ["coserve-plus", "coserve-plus-without-making-room"]
    options = [text for policy in policies for text in ("--policy", policy)]
    out = tmp_path / "out.json"
    done = CliRunner().invoke(
        app, ["bench", "ablation", "--dir", str(tmp_path), "--machine", "numa", *options, "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())
    assert len(rows) == 2 * 2 * len(policies) * 3
    assert {row["policy"] for row in rows} == set(policies)
    assert all(0 < row["share_of_bound"] <= row["share_of_attainable"] <= 1.0 for row in rows)
