"""The drive with real threads, a real slot pool, a real journal and experts with random weights."""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon.dispatch.channels import Channels
from daemon.dispatch.drive import Drive, Stop
from daemon.dispatch.executors import ExecutorThread
from daemon.dispatch.flow import Chains
from daemon.dispatch.loader import PoolLoader
from daemon.dispatch.trace import Makeup, replay
from daemon.line.rulebook import Rulebook
from daemon.policy.paper.assign import partition
from daemon.policy.predict import expert_facts
from daemon.policy.presets import Tuning, preset
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId
from daemon.records import Accepted, ExpertSwitch, JournalKey, Outcome, Pixels
from daemon.storage.journal import Journal
from experts.spec import ExpertId, ExpertSpec
from experts.vision.infer import infer
from experts.vision.slot import SlotPool
from routing_rules.compile import compile_rules
from tests.daemon.dispatch.simulated_line import reports_to
from tests.experts.samples import a_picture, an_expert_file, encoded

CPU = PoolId("cpu")
RULES = """
boards:
  main: {components: {A: 10, B: 10, C: 10}}
classifiers:
  "*": {expert: "{component}", pass: [label0, label1, label2, label3, label4], then: solder}
detectors:
  solder: {expert: yolo, review_on: {label0: 0.99}}
"""


@dataclass
class Bench:
    """`images_left`: a permit for each image that executors may still read. `others` are threads that ran before."""

    drive: Drive
    pools: tuple[SlotPool, ...]
    journal: Journal
    outcomes: "queue.SimpleQueue[Outcome]"
    switches: list[ExpertSwitch]
    version: str
    payloads: list[bytes]
    images_left: threading.Semaphore
    others: set[threading.Thread]
    last: int = 0

    def accept(self, *components: str, payload: bytes | None = None) -> None:
        data = [payload or self.payloads[n % len(self.payloads)] for n in range(len(components))]
        images: list[Accepted] = []
        for key, component in zip(self.journal.append(data), components, strict=True):
            self.last += 1
            images.append(
                Accepted(self.last, "cam", str(self.last), "main", component, 0.0, None, self.version, key, Pixels())
            )
        self.drive.accept(images)

    def wait(self, count: int) -> dict[int, Outcome]:
        outcomes = [self.outcomes.get(timeout=60.0) for _ in range(count)]
        assert self.outcomes.empty()
        return {outcome.inspection_id: outcome for outcome in outcomes}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[ExpertId, ExpertSpec]:
    folder = tmp_path_factory.mktemp("weights")
    experts = [an_expert_file(folder, name, "resnet18", 5, seed) for seed, name in enumerate("ABC")]
    experts.append(an_expert_file(folder, "yolo", "yolov8n", 2))
    return {spec.expert: spec for spec in experts}


@pytest.fixture(params=["samba", "coserve", "coserve-plus"])
def bench(request: pytest.FixtureRequest, specs: dict[ExpertId, ExpertSpec], tmp_path: Path) -> Iterator[Bench]:
    """Memory for one classifier, or the detector and nothing else: every chain needs at least two switches."""
    others, rules = set(threading.enumerate()), preset(request.param)
    budget_bytes = specs[ExpertId("A")].weights_bytes * (2 if rules.own_pools else 1)
    streams = [ExecutorFacts(ExecutorId(f"cpu/{n}"), CPU) for n in range(2)]
    facts, executors = partition([PoolFacts(CPU, "cpu", budget_bytes, 4)], streams, rules)
    pools, channels = {share.pool: SlotPool("cpu", share.budget_bytes) for share in facts}, Channels()
    journal = Journal(tmp_path / "journal")
    routes = compile_rules(RULES)
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    switches: list[ExpertSwitch] = []
    images_left = threading.Semaphore(200)

    def read(key: JournalKey) -> bytes:
        assert images_left.acquire(timeout=60.0)
        return journal.read(key)

    drive = Drive(
        Makeup(expert_facts(specs.values(), routes, {}), facts, executors, request.param, Tuning()),
        Chains(Rulebook(routes).get, time.monotonic, time.time),
        specs,
        [ExecutorThread(each, pools[each.pool].slot, read, infer) for each in executors],
        [PoolLoader(name, pool, channels, pools) for name, pool in pools.items()],
        record=tmp_path / "trace.jsonl",
    )
    payloads = [encoded(a_picture(seed=seed)) for seed in range(4)]
    drive.start(reports_to(finished=outcomes.put, switched=switches.append))
    yield Bench(
        drive, tuple(pools.values()), journal, outcomes, switches, routes.version, payloads, images_left, others
    )
    assert drive.stop(60.0)
    journal.close()
    for pool in pools.values():
        pool.check()
    assert list(replay(tmp_path / "trace.jsonl")) == []


def test_chains_run_with_memory_for_one_expert_and_the_run_replays(bench: Bench):
    bench.accept(*"ABCABCABCABC")
    outcomes = bench.wait(12)
    assert len(outcomes) == 12
    assert all(outcome.verdict in ("pass", "review") for outcome in outcomes.values())
    assert all([stage.expert for stage in outcome.stages][1:] == ["yolo"] for outcome in outcomes.values())
    assert all(pool.used_bytes <= pool.budget_bytes for pool in bench.pools)
    before = len(bench.switches)
    while (status := bench.drive.ask("status", {})) and len(bench.switches) != before:
        before = len(bench.switches)  # a load that was under way has ended meanwhile
    assert status["completed"] == 12
    assert status["expert_switches"] == sum(switch.cause != "startup" for switch in bench.switches[:before])


def test_a_missing_file_and_a_bad_image_fail_alone(bench: Bench, specs: dict[ExpertId, ExpertSpec]):
    file = specs[ExpertId("B")].file
    aside = file.rename(file.with_suffix(".aside"))
    try:
        bench.accept(*"BA")
        bench.accept("A", payload=b"not an image at all")
        outcomes = bench.wait(3)
    finally:
        aside.rename(file)
    assert [outcomes[n].reason for n in (1, 2, 3)] == ["expert_failed", None, "bad_image"]


def test_weights_that_are_replaced_under_a_running_daemon_fail_alone_and_are_named(
    bench: Bench, specs: dict[ExpertId, ExpertSpec]
):
    bench.accept(*"BBAA")
    bench.wait(4)
    file = specs[ExpertId("B")].file
    right = file.read_bytes()
    try:
        middle = len(right) // 2
        file.write_bytes(right[:middle] + bytes(64) + right[middle + 64 :])
        bench.accept("A")
        bench.wait(1)
        if any("B" in pool.resident() for pool in bench.pools):
            bench.drive.ask("unload", {"expert": "B"})
        bench.accept("B", "A")
        outcomes = bench.wait(2)
        reasons = sorted((outcome.reason or "") for outcome in outcomes.values())
        assert reasons == ["", "expert_failed"]
        assert "B" in str(bench.drive.ask("status", {})["last_error"])
        assert "sha256" in str(bench.drive.ask("status", {})["failed"]["B"])
    finally:
        file.write_bytes(right)


def test_stop_reports_what_runs_and_leaves_the_rest(bench: Bench):
    bench.accept(*"ABC" * 40)
    first = bench.outcomes.get(timeout=60.0)
    assert first.verdict in ("pass", "review")
    bench.drive._events.put(Stop())  # what `stop` begins with, before executors may read all of 120 images twice
    bench.images_left.release(200)
    assert bench.drive.stop(60.0)
    assert 1 + bench.outcomes.qsize() < 120
    threads = set(threading.enumerate()) - bench.others
    assert not any(thread.name.startswith(("executor", "loader", "drive")) for thread in threads)
