"""`coserve bench paper`: every policy in both worlds, and ranges that say how many cases are within them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from daemon.policy.presets import PRESETS
from tests.bench.paper import DEVICES, WORLDS, simulated
from tools.cli.main import app

pytestmark = pytest.mark.test_all


@pytest.mark.parametrize(
    ("device", "task", "samba", "coserve"),
    [
        ("numa", "A1", 8.8, 30.3),
        pytest.param("uma", "A1", 8.5, 29.1, marks=pytest.mark.test_all),
        pytest.param("numa", "A1-board", 3.4, 19.1, marks=pytest.mark.test_all),
        ("uma", "A1-board", 6.1, 27.2),
    ],
)
def test_with_slots_for_all_the_papers_policies_are_as_fast_as_a_reader_found(
    device: str, task: str, samba: float, coserve: float
) -> None:
    rows = {policy: simulated(device, task, "slots", policy) for policy in ("samba", "coserve", "coserve-plus")}
    assert rows["samba"].images_per_s == pytest.approx(samba, rel=0.01)
    assert rows["coserve"].images_per_s == pytest.approx(coserve, rel=0.01)
    assert rows["coserve"].images_per_s < rows["coserve-plus"].images_per_s
    assert rows["coserve-plus"].share_of_bound < 1


@pytest.mark.test_all
def test_the_command_has_every_policy_on_both_devices_in_both_worlds(tmp_path: Path) -> None:
    out = tmp_path / "paper.json"
    done = CliRunner().invoke(app, ["bench", "paper", "--tasks", "A1", "--no-ranges", "--json", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert {(row["device"], row["loading"], row["policy"]) for row in rows} == {
        (device, loading, policy) for device in DEVICES for loading in WORLDS for policy in PRESETS
    }
    ordinary, slots = ({row["policy"]: row for row in rows if row["loading"] == loading} for loading in WORLDS)
    assert all(ordinary[policy]["images_per_s"] < slots[policy]["images_per_s"] for policy in PRESETS)
    assert "read ratios, not seconds" in done.stdout
