"""A recorded run replays to the same actions, and an altered trace is noticed."""

import json
from pathlib import Path

import pytest

from daemon.dispatch.trace import TraceError, read_makeup
from daemon.policy.matrix import Performance
from daemon.policy.presets import PRESETS
from daemon.wire.control import ControlError
from experts.spec import ArchitectureId, ExpertId
from tests.daemon.dispatch.replaying import replay
from tests.daemon.dispatch.simulated_line import a_catalog, a_line, a_mix, says


def record(path: Path, policy: str) -> None:
    line = a_line(
        policy=policy,
        budgets={"cuda:0": 20, "cpu": 40, "ram": 30},
        executors=("cuda:0", "cpu", "cpu"),
        matrix=[Performance("cuda:0", ArchitectureId("resnet18"), 0.005, 0.01, 3, disk_s=0.1, ram_s=0.01)],
        usage={ExpertId("B"): 0.9},
        record=path,
        answer=says({3: "bad_image", 5: "missing", 8: "odd"}),
    )
    for pool in line.pools.values():
        pool.memory.broken[ExpertId("C")] = "damaged"
    line.accept(*a_mix(50), *a_mix(10, first=50, deadline_ms=400))
    line.run(until_s=0.35)
    pinned = line.drive.ask_later("pin", {"expert": "A2"})
    refused = line.drive.ask_later("limits", {"expert_memory": {"cuda:0": 1, "cpu": 1}})
    line.put_in_force({name: spec for name, spec in a_catalog().items() if name != "A1"})
    line.run()
    assert pinned.done()
    with pytest.raises(ControlError):
        refused.result(0)
    assert len(line.outcomes) == 60
    line.drive.stop(1.0)


@pytest.mark.parametrize("policy", PRESETS)
def test_a_recorded_run_replays_to_the_same_actions(tmp_path: Path, policy: str):
    trace = tmp_path / "trace.jsonl"
    record(trace, policy)
    calls = [json.loads(line).get("call") for line in trace.read_text().splitlines()]
    assert {"arrive", "next_action", "next_load", "batch_done", "load_done", "replace_facts"} <= set(calls)
    assert replay(trace) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a trace"),
        ('{"trace": 1}', "format 1, and this version reads 3: record the run again"),
        ("hello\n", "not a trace"),
        ("[1]\n", "not a trace"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(TraceError, match=message):
        read_makeup(tmp_path / "trace")
