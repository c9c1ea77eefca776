"""Batches and loads that do not end: others are served, images are tried once more, and the log names what hangs."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.dispatch.drive import Drive
from daemon.dispatch.pool import Batch, DevicePool, Fault, StoredImage
from daemon.dispatch.trace import Makeup
from daemon.dispatch.watch import Watch
from daemon.policy.predict import expert_facts
from daemon.policy.presets import PRESETS, Tuning
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId
from daemon.records import JournalKey, Verdict
from experts.spec import Answer, ExpertId, ExpertSpec
from experts.vision.preprocess import Prepared
from experts.vision.slot import Slot, SlotPool
from tests.daemon.dispatch.replaying import replay
from tests.daemon.dispatch.simulated_line import Line, a_catalog, a_line, a_mix, an_image, reports_to, routes
from tests.daemon.policy.books import check_scheduler
from tests.editions import a_serving
from tests.experts.pictures import a_picture, encoded
from tests.experts.samples import an_expert_file
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.not_fast("computes with torch")

FOREVER_S = 1e6


def hang(
    line: Line, expert: str, *, times: int = 1 << 30, seconds: float = FOREVER_S, image: int | None = None
) -> list[Batch]:
    """The next `times` batches of `expert` (that hold `image`, if named: its decoding hangs) take `seconds` more."""
    hung: list[Batch] = []

    def hangs(batch: Batch) -> tuple[float, int | None]:
        blamed = next((number for number, each in enumerate(batch.images) if each.key.offset == image), None)
        if batch.spec.expert != expert or len(hung) == times or (image is not None and blamed is None):
            return 0.0, None
        hung.append(batch)
        return seconds, blamed

    for pool in line.pools.values():
        pool.hangs = hangs
    return hung


def heal(line: Line) -> None:
    """Let no further batch and no further load hang."""
    for pool in line.pools.values():
        pool.hangs = lambda _batch: (0.0, None)
        pool.hangs_s.clear()


# Time


def overdue(watch: Watch[str], until_s: float) -> list[tuple[str, float]]:
    """Check as often as the watch asks to, until then; return all that was overdue, with its seconds rounded."""
    late: list[tuple[str, float]] = []
    while (now := watch.next_s()) is not None and now < until_s:
        late += watch.overdue(now)
    return [(key, round(seconds, 3)) for key, seconds in (*late, *watch.overdue(until_s))]


def test_what_takes_twenty_times_longer_than_predicted_hangs_and_nothing_before_the_least_patience() -> None:
    watch: Watch[str] = Watch(30.0)
    watch.begin("short", 0.0, 0.1)
    watch.begin("long", 0.0, 4.0)
    watch.begin("unknown", 0.0, None, pieces=8)
    assert overdue(watch, 29.9) == []
    assert overdue(watch, 30.0) == [("short", 30.0)]
    assert overdue(watch, 79.9) == []
    assert overdue(watch, 80.5) == [("long", 80.0)]
    watch.end("unknown")
    assert (watch.next_s(), watch.overdue(1e9)) == (None, [])


@pytest.mark.promise(
    "Containment",
    "Time in which the whole process stood still (SIGSTOP, a debugger, a paused machine) makes no batch, load "
    "or step of a language model hang",
)
@pytest.mark.parametrize("stands_s", [29.5, 30.0, 31.0, 40.0, 3600.0])
def test_a_process_that_stood_still_makes_no_batch_hang(stands_s: float) -> None:
    watch: Watch[str] = Watch(30.0)
    watch.begin("batch", 100.0, 0.1)
    assert overdue(watch, 105.0) == []
    assert watch.overdue(105.0 + stands_s) == []
    assert overdue(watch, 127.0 + stands_s) == []
    assert overdue(watch, 131.0 + stands_s) != []


# Batches, simulated


@pytest.mark.promise(
    "Containment",
    "A batch that hangs is abandoned and tried once more; if it hangs again, its images are `unknown`",
)
@pytest.mark.parametrize("policy", PRESETS)
def test_a_batch_that_hangs_once_costs_no_image(policy: str) -> None:
    line = a_line(policy=policy, budgets={"cpu": 60}, executors=["cpu", "cpu"])
    hung = hang(line, "B", times=1)
    line.accept(*a_mix(40))
    line.run(until_s=600.0)
    assert len(hung) == 1
    assert set(line.reasons().values()) == {None}
    assert len(line.outcomes) == 40
    assert line.drive.is_failing, "a thread is left behind"
    assert "did not end within" in line.ask("status")["last_error"]


def test_an_image_whose_second_batch_hangs_too_is_unknown_and_its_expert_failed_until_a_reload() -> None:
    line = a_line(budgets={"cpu": 60}, executors=["cpu", "cpu"])
    hung = hang(line, "B")
    line.accept(*(an_image(n, "B") for n in range(12)), *(an_image(100 + n, "C") for n in range(12)))
    line.run(until_s=1000.0)
    assert len(hung) <= 3, "two are enough to fail it; a third may have been under way"
    assert {line.outcomes[n].reason for n in range(12)} == {"expert_failed"}
    assert {line.outcomes[n].verdict for n in range(12)} == {"unknown"}
    assert {line.outcomes[100 + n].verdict for n in range(12)} == {"pass"}
    rows = {row["expert"]: row for row in line.ask("experts")["experts"]}
    assert "twice; replace the expert and reload" in rows["B"]["failed"]
    line.accept(an_image(50, "B", accepted_s=1000.0))
    line.run(until_s=2000.0)
    assert line.outcomes[50].reason == "expert_failed"
    assert len(hung) <= 3, "a failed expert is not tried again"
    heal(line)
    line.put_in_force(a_catalog())
    line.accept(an_image(51, "B", accepted_s=2000.0))
    line.run(until_s=3000.0)
    assert line.outcomes[51].verdict == "pass"


@pytest.mark.promise(
    "Containment",
    "An image whose decoding does not end is `bad_image`; the other images of its batch are judged",
)
def test_an_image_whose_decoding_does_not_end_is_bad_and_its_neighbours_are_judged() -> None:
    line = a_line(budgets={"cpu": 60}, max_batch=4)
    hung = hang(line, "B", image=2)
    line.accept(*(an_image(n, "B") for n in range(4)))
    line.run(until_s=600.0)
    assert len(hung) == 1
    assert line.reasons() == {0: None, 1: None, 2: "bad_image", 3: None}
    ((image, reason),) = line.bad_images
    assert (image.image_id, "did not end" in reason) == ("2", True)
    assert line.ask("experts")["experts"][2]["failed"] is None, "it is not the expert's fault"


@pytest.mark.parametrize("policy", PRESETS)
def test_images_whose_bytes_cannot_be_read_just_now_are_tried_again_and_no_image_waits_behind_them(policy: str) -> None:
    line = a_line(policy=policy, budgets={"cpu": 60})

    def answer(_spec: ExpertSpec, image: StoredImage) -> Answer | Fault:
        is_back = line.clock.now() > 100.0 and image.key.offset == 1
        if image.key.offset < 3 and not is_back:
            return Fault("unreadable", "journal segment 1, offset 0: cannot read: Permission denied")
        return Answer("ok", 0.9)

    for pool in line.pools.values():
        pool._answer = answer
    line.accept(an_image(1, "B"), an_image(2, "B"), an_image(0, "C", deadline_ms=20_000))
    line.accept(*(an_image(10 + n, "B") for n in range(8)))
    line.run(until_s=50.0)
    assert line.reasons() == {0: "deadline"} | {10 + n: None for n in range(8)}
    assert line.drive.is_failing
    assert "Permission denied" in line.ask("status")["last_error"]
    line.run(until_s=110.0)
    assert line.outcomes[1].verdict == "pass"
    line.run(until_s=400.0)
    assert line.outcomes[2].reason == "bad_image"
    assert line.ended_s[2] == pytest.approx(300.0, abs=6.0)
    assert [image.image_id for image, _ in line.bad_images] == ["2"]


# Loads, simulated


@pytest.mark.parametrize("policy", PRESETS)
def test_a_load_that_hangs_delays_no_other_expert_and_its_images_wait_for_it(policy: str) -> None:
    line = a_line(policy=policy, budgets={"cpu": 60})
    for pool in line.pools.values():
        pool.hangs_s[ExpertId("B")] = 200.0
    line.accept(an_image(0, "B"), an_image(1, "B", deadline_ms=100_000))
    line.accept(*(an_image(2 + n, ["A1", "A2", "C"][n % 3]) for n in range(30)))
    line.run(until_s=150.0)
    assert line.reasons() == {1: "deadline"} | {2 + n: None for n in range(30)}
    assert line.ended_s[1] == pytest.approx(100.0, abs=1.0)
    assert line.drive.is_failing
    heal(line)
    line.run(until_s=600.0)
    assert line.outcomes[0].verdict == "pass"
    assert not line.drive.is_failing


# Everything together


@settings(max_examples=15, deadline=None)
@given(data=st.data(), policy=st.sampled_from(sorted(PRESETS)), pools=st.sampled_from([["cpu"], ["cuda:0", "cpu"]]))
def test_every_image_ends_once_and_the_run_replays_although_batches_and_loads_hang(
    data: st.DataObject, policy: str, pools: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    trace = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    executors = [name for name in pools for _ in range(2)]
    line = a_line(policy=policy, budgets=dict.fromkeys(pools, 40), executors=executors, record=trace)
    try:
        _let_everything_hang(line, data)
    finally:
        line.drive.stop(1.0)
    assert replay(trace) == []


def _let_everything_hang(line: Line, data: st.DataObject) -> None:
    seconds = st.sampled_from([0.0, 0.0, 0.0, 0.0, 45.0, 400.0, FOREVER_S])

    def hangs(batch: Batch) -> tuple[float, int | None]:
        taken_s = data.draw(seconds, label="batch")
        blames = taken_s > 0.0 and data.draw(st.booleans(), label="decoding")
        return taken_s, 0 if blames else None

    for pool in line.pools.values():
        pool.hangs = hangs
        pool.hangs_s = {name: data.draw(seconds, label="load") for name in a_catalog()}
    line.accept(*a_mix(15), *a_mix(15, first=15, deadline_ms=60_000))
    line.run(until_s=300.0)
    heal(line)
    line.put_in_force(a_catalog())
    line.accept(*(an_image(100 + n, "B", deadline_ms=600_000, accepted_s=300.0) for n in range(4)))
    line.run(until_s=20_000.0)
    assert {n for n in line.outcomes if n >= 100} == {100, 101, 102, 103}
    missing = set(range(30)) - line.outcomes.keys()
    assert not missing or line.drive.is_failing, "an image may wait only while something hangs"
    check_scheduler(line.drive._scheduler)


# Threads

HANG_AFTER_S = 1000.0


class HangingBench:
    """A drive over a real pool, a real executor thread and a real loader; the first forward pass waits for `go_on`."""

    def __init__(self, folder: Path, hang_after_s: float = HANG_AFTER_S) -> None:
        spec = an_expert_file(folder)
        self.go_on, self.begun, self.threads = threading.Event(), threading.Event(), list[threading.Thread]()
        rules = f"""
boards: {{main: {{extras: allow, components: {{B: 1}}}}}}
classifiers: {{B: {{expert: {spec.expert}, pass: [{spec.classes[0]}], review_below: 0.0}}}}
"""
        serving = a_serving(routes(rules), {ExpertId(spec.name): spec})
        self._stands_at_s = time.monotonic()
        self._goes_since_s: float | None = None
        name, payload = PoolId("cpu"), encoded(a_picture())
        facts = ExecutorFacts(ExecutorId("cpu/0"), name)
        self.marks: list[JournalKey | None] = []
        pool = DevicePool(
            name,
            [facts.executor],
            SlotPool("cpu", spec.weights_bytes),
            self._run,
            lambda _key: payload,
            new_mark=lambda: self.marks.append,
            clock=self.now_s,
        )
        self.outcomes: list[Verdict] = []
        self.drive = Drive(
            Makeup(
                expert_facts([spec], routes(rules), {}),
                (PoolFacts(name, "cpu", spec.weights_bytes, 4),),
                (facts,),
                "coserve-plus",
                Tuning(),
            ),
            serving,
            [pool],
            hang_after_s=hang_after_s,
            clock=self.now_s,
        )
        self.drive.start(reports_to(finished=self.outcomes.extend))
        self.drive.accept([an_image(1)])
        assert self.begun.wait(60.0)

    def _run(self, slot: Slot, prepared: Sequence[Prepared], _experts: Sequence[ExpertSpec]) -> list[Answer]:
        self.threads.append(threading.current_thread())
        if len(self.threads) == 1:
            self.begun.set()
            assert self.go_on.wait(60.0)
        return [Answer(slot.spec.classes[0], 0.9) for _ in prepared]

    def now_s(self) -> float:
        """Return the drive's time, which stands still until `hang`."""
        return self._stands_at_s + (0.0 if self._goes_since_s is None else time.monotonic() - self._goes_since_s)

    def hang(self) -> None:
        """Move the clock until the batch that runs now has run for too long; wait for its second try."""
        for _ in range(31):
            self._stands_at_s += HANG_AFTER_S / 30.0
            self.drive.ask_later("status", {}).result(60.0)  # so that it checks now, not when its timer ends
        self.wait(lambda: self.drive.is_failing)
        self._goes_since_s = time.monotonic()
        self.wait(lambda: len(self.outcomes) == 1)

    def wait(self, happened: Callable[[], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_a_thread_that_hangs_is_left_behind_and_its_batch_runs_in_a_new_one(tmp_path: Path) -> None:
    bench = HangingBench(tmp_path)
    bench.hang()
    assert (bench.outcomes[0].verdict, len(set(bench.threads))) == ("pass", 2)
    assert bench.drive.is_failing
    bench.go_on.set()
    bench.wait(lambda: not bench.drive.is_failing)
    bench.threads[0].join(60.0)
    assert not bench.threads[0].is_alive()
    assert len(bench.outcomes) == 1
    assert bench.marks[0] is not None
    assert bench.marks[-1] is None
    assert bench.drive.stop(60.0)


class SuspendedBench(HangingBench):
    """In a process of its own, on the real clock; the first forward pass waits for `go_on` of the test."""

    def now_s(self) -> float:
        return time.monotonic()


def judge_one_image(folder: Path, begun: Event, go_on: Event, results: "Queue[tuple[str, int, bool]]") -> None:
    bench = SuspendedBench(folder, hang_after_s=4.0)
    begun.set()
    go_on.wait(60.0)
    bench.go_on.set()
    bench.wait(lambda: len(bench.outcomes) == 1)
    results.put((bench.outcomes[0].verdict, len(bench.threads), bench.drive.is_failing))
    bench.drive.stop(60.0)


@pytest.mark.test_all  # a real process stands still for half a minute
def test_a_daemon_that_was_suspended_takes_no_batch_for_hung(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    begun, go_on, results = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=judge_one_image, args=(tmp_path, begun, go_on, results))
    process.start()
    assert process.pid
    assert begun.wait(PATIENCE_S)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(5.0)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    go_on.set()
    assert results.get(timeout=PATIENCE_S) == ("pass", 1, False)
    process.join(PATIENCE_S)
    assert process.exitcode == 0
