"""The drive with real threads, a real slot pool, a real journal and experts with random weights."""

import queue
from pathlib import Path

import pytest

from daemon.dispatch.drive import Drive
from daemon.dispatch.pool import device_pools
from daemon.dispatch.trace import Makeup
from daemon.policy.paper.assign import partition
from daemon.policy.predict import expert_facts
from daemon.policy.presets import Tuning, preset
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId
from daemon.records import BoardRef, ExpertSwitch, Image, Verdict
from daemon.storage.journal import Journal
from experts.spec import ExpertId, ExpertSpec
from experts.vision.infer import infer_each
from experts.vision.preprocess import MAX_PIXELS
from experts.vision.slot import SlotPool
from routing_rules.compile import compile_rules
from tests.daemon.dispatch.replaying import replay
from tests.daemon.dispatch.simulated_line import reports_to
from tests.editions import a_serving
from tests.experts.pictures import a_picture, encoded
from tests.experts.samples import an_expert_file

pytestmark = pytest.mark.not_fast("computes with torch")

CPU = PoolId("cpu")
RULES = """
boards:
  main: {components: {A: 10, B: 10, C: 10}}
classifiers:
  "*": {expert: "{component}", pass: [label0, label1, label2, label3, label4], then: solder}
detectors:
  solder: {expert: yolo, review_on: {label0: 0.99}}
"""


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[ExpertId, ExpertSpec]:
    folder = tmp_path_factory.mktemp("weights")
    experts = [an_expert_file(folder, name, "resnet18", 5, seed) for seed, name in enumerate("ABC")]
    experts.append(an_expert_file(folder, "yolo", "yolov8n", 2))
    return {spec.expert: spec for spec in experts}


@pytest.mark.parametrize("policy", ["samba", "coserve", "coserve-plus"])
def test_chains_run_with_memory_for_one_expert_and_the_run_replays(
    policy: str, specs: dict[ExpertId, ExpertSpec], tmp_path: Path
):
    """Memory for one classifier, or the detector and nothing else: every chain needs at least two switches."""
    budget_bytes = specs[ExpertId("A")].weights_bytes * (2 if preset(policy).own_pools else 1)
    streams = [ExecutorFacts(ExecutorId(f"cpu/{n}"), CPU) for n in range(2)]
    facts, executors = partition([PoolFacts(CPU, "cpu", budget_bytes, 4)], streams, preset(policy))
    slots = {share.pool: SlotPool("cpu", share.budget_bytes) for share in facts}
    journal, routes = Journal(tmp_path / "journal"), compile_rules(RULES)
    reports: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
    switches: list[ExpertSwitch] = []
    serving = a_serving(routes, specs)
    drive = Drive(
        Makeup(expert_facts(specs.values(), routes, {}), facts, executors, policy, Tuning()),
        serving,
        device_pools(facts, executors, slots, infer_each, journal.read, lambda: lambda _key: None, MAX_PIXELS),
        record=tmp_path / "trace.jsonl",
    )
    drive.start(reports_to(finished=lambda outcomes: [*map(reports.put, outcomes)], switched=switches.append))
    keys = journal.append([encoded(a_picture(seed=seed % 4)) for seed in range(12)])
    board = BoardRef("main", "S1")
    images = [
        Image("cam", str(n), board, "ABC"[n % 3], str(n), inspection_id=n, edition=1, key=key)
        for n, key in enumerate(keys, 1)
    ]
    drive.accept(images)
    outcomes = [reports.get(timeout=60.0) for _ in keys]
    assert {outcome.image.inspection_id for outcome in outcomes} == set(range(1, 13))
    assert all(outcome.verdict in ("pass", "review") for outcome in outcomes)
    assert all([stage.expert for stage in outcome.stages][1:] == ["yolo"] for outcome in outcomes)
    assert all(memory.used_bytes <= memory.budget_bytes for memory in slots.values())
    before = len(switches)
    while (status := drive.ask("status", {})) and len(switches) != before:
        before = len(switches)  # a load that was under way has ended meanwhile
    assert status["completed"] == 12
    assert status["expert_switches"] == sum(switch.cause != "startup" for switch in switches[:before])
    assert drive.stop(60.0)
    journal.close()
    for memory in slots.values():
        assert memory.used_bytes <= memory.budget_bytes
    assert replay(tmp_path / "trace.jsonl") == []
