"""The daemon's own memory of its work, which `coserve` and the page Machine show."""

import pytest

from daemon.monitor.timeline import WorkTimeline
from daemon.records import BatchDone, ExpertSwitch, QueueSample


def test_the_daemon_remembers_what_ran_what_was_loaded_and_what_waited() -> None:
    now = 1000.0
    timeline = WorkTimeline(lambda: now)
    for number in range(1500):
        ended_s = 800.0 + number * 0.1
        timeline.batches.append(BatchDone("cpu/0", "cpu", "A", "r", 0, 4, ended_s - 0.05, ended_s, 0.0, 40.0))
    timeline.loads.append(ExpertSwitch(990.0, "cpu", "cpu", "A", (), 100, 2000.0, "disk", "demand"))
    for at_s in (900.0, 995.0):
        timeline.samples.append(QueueSample(at_s, 5, 3, 1, {"cpu": 2}, {"cpu/0": 1.0}))
    work = timeline.work(60.0)
    assert (len(work["batches"]), work["more"]) == (100, False)  # those that ended after 940
    assert work["batches"][-1]["ended_s"] == pytest.approx(50.1, abs=0.2)
    assert (work["loads"][0]["began_s"], work["loads"][0]["ended_s"]) == (12.0, 10.0)
    assert (len(timeline.work(3600.0)["batches"]), timeline.work(3600.0)["more"]) == (1000, True)
    # The value that held before is told too.
    assert [sample["ago_s"] for sample in timeline.waits(60.0)["samples"]] == [100.0, 5.0]
