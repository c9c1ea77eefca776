"""`coserve simulate --trace`: a recorded run, predicted from its own arrivals, chains and costs."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from daemon.dispatch.trace import TraceError
from daemon.policy.presets import PRESETS
from tests.daemon.dispatch.simulated_line import a_line, an_image
from tools.cli.main import app
from tools.simulate.bound import task_bound
from tools.simulate.engine import Simulation
from tools.simulate.recorded import Recorded


def record(path: Path, policy: str, images: int = 80) -> float:
    """A run of images that all wait from the start; the seconds it took."""
    line = a_line(policy=policy, budgets={"cpu": 40}, executors=("cpu", "cpu"), record=path)
    line.accept(*(an_image(number, ["A1", "A2", "B"][number % 3]) for number in range(images)))
    line.run()
    line.drive.stop(1.0)
    assert len(line.outcomes) == images
    return max(line.ended_s.values())


@pytest.mark.parametrize("policy", PRESETS)
def test_a_recorded_run_is_predicted_within_a_tenth(tmp_path: Path, policy: str):
    took_s = record(tmp_path / "trace", policy)
    recorded = Recorded(tmp_path / "trace")
    assert len(recorded.task.images) == recorded.answered == 80
    assert recorded.makespan_s == pytest.approx(took_s)
    machine = recorded.machine(policy)
    outcome = Simulation(machine, recorded.task, policy, tuning=recorded.tuning, prefilled=recorded.prefilled).run()
    assert outcome.makespan_s == pytest.approx(took_s, rel=0.1)
    assert 0 < task_bound(machine, recorded.task).seconds < took_s


def test_another_policy_can_be_asked_what_it_would_have_done(tmp_path: Path):
    record(tmp_path / "trace", "samba")
    command = ["simulate", "--trace", str(tmp_path / "trace"), "--json"]
    command += ["--policy", "samba", "--policy", "coserve-plus"]
    rows = json.loads(CliRunner().invoke(app, command).stdout)
    assert [row["policy"] for row in rows] == ["samba", "coserve-plus"]
    assert rows[1]["images_per_s"] > rows[0]["images_per_s"]
    assert rows[0]["live"]["images_per_s"] > 0


@pytest.mark.parametrize(
    ("find", "replacement", "reason"),
    [
        ('"policy":"samba"', '"policy":"gone"', ":1: not a trace .*policy 'gone' is unknown"),
        (r'"batch_done","args":\["cpu/0",[^\]]*', '"batch_done","args":["cpu/0",0.0', "greater than 0"),
        (r'"batch_done","args":\["cpu/0"', '"batch_done","args":["cpu/9"', r":\d+: contradicts the lines before it"),
        (r'\n.*"call":"arrive".*', "", r":\d+: contradicts the lines before it"),
    ],
)
def test_a_trace_of_a_policy_that_is_gone_without_times_or_edited_by_hand_is_refused(
    tmp_path: Path, find: str, replacement: str, reason: str
):
    record(tmp_path / "trace", "samba")
    text, count = re.subn(find, replacement, (tmp_path / "trace").read_text(), count=1)
    assert count == 1
    (tmp_path / "trace").write_text(text)
    with pytest.raises(TraceError, match=reason):
        Recorded(tmp_path / "trace")
