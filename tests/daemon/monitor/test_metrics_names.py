"""Every metric of a line that has everything: GPUs, sensors, children, consumers, errors."""

import shutil
import subprocess

import pytest

from daemon.host.temperature import Reading
from daemon.monitor.metrics import Gauges, Metrics
from daemon.records import BatchDone, ExpertSwitch, Generation, Outcome, Published, Stage
from daemon.storage.disk_space import FreeSpace

#: A name that would break a text format that escapes nothing.
HOSTILE = 'a"} 1\n# TYPE x counter\\'


def a_scrape(**changed: object) -> str:
    metrics = Metrics({"R0402": "resnet18"}.get)
    facts = {
        "version": "0.1.0",
        "policy": "coserve-plus",
        "rules_version": "0123456789ab",
        "state": "degraded",
        "is_ready": True,
        "held_s": 1.5,
        "backlog": 3,
        "backlog_bytes": 300,
        "last_seq": 7,
        "wal_bytes": 4096,
        "disks": {"journal": FreeSpace(1, 1000, 10)},
        "scheduler": {
            "pools": [
                {"device": "cpu", "experts": 2, "used_bytes": 10, "budget_bytes": 20},
                {"device": "cpu", "experts": 3, "used_bytes": 5, "budget_bytes": 20},
                {"device": "cuda:0", "experts": 1, "used_bytes": 1, "budget_bytes": 2},
            ],
            "executors": [
                {"name": "cpu/0", "busy_share": 0.5},
                {"name": "cuda:0/0", "busy_share": 0.0, "out_of_service": "CUDA error"},
            ],
            "queued": {"by_device": {"cpu": 4, "cuda:0": 0}, "unloaded": 2},
            "failed": {"A": "why"},
            "retries": 9,
        },
        "children": [
            {"name": "dashboard", "state": "running", "restarts": 0},
            {"name": HOSTILE, "state": "waiting", "restarts": 5},
        ],
        "consumers": [{"name": "plant", "behind": 12}, {"name": "new", "behind": None}],
        "models": [
            {"name": "writer", "budget_bytes": 9, "used_bytes": 8, "text_budget_bytes": 3, "text_used_bytes": 2},
            {"name": HOSTILE, "budget_bytes": 5},
        ],
        "shadows": [{"answers": 3, "dropped": 1}, {"answers": 4, "dropped": 0}],
        "alarm_counts": {"solder": 1},
        "temperatures": [Reading("cuda:0", 71.0), Reading("coretemp", 48.5)],
    } | changed
    metrics.registry.register(Gauges(lambda: facts))
    stage = Stage("R0402", "v", "ok", 0.9, (), "cpu", "cpu/0", 1, 8, 12.0, 0.0, 2.0, "s", "{}")
    metrics.finished([Outcome(1, "pass", None, None, (stage, stage))])
    metrics.batch_done(BatchDone("cpu/0", "cpu", "R0402", "resnet18", 0, 8, 1.0, 2.0, 30.0, 20.0))
    metrics.switched(ExpertSwitch(1.0, "cpu", "cpu", "R0402", (), 100, 20.0, "disk", "demand"))
    metrics.published([Published(1, "inspection/a/b/", {"verdict": "unknown", "reason": HOSTILE, "latency_ms": 5.0})])
    metrics.answered("rejected", "bad_image")
    metrics.reviewed("pass")
    metrics.pruned("images", 2)
    metrics.text_finished(Generation("s", "g", "m", "why?", reason="deadline"))
    return metrics.exposition()


def test_promtool_finds_nothing_to_say_about_a_line_that_has_everything() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool: make system-tools")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=a_scrape(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_look_that_fails_costs_the_gauges_and_no_counter() -> None:
    metrics = Metrics()

    def look() -> dict[str, object]:
        raise RuntimeError("the line is just beginning")

    metrics.registry.register(Gauges(look))
    metrics.reviewed("fail")
    assert 'coserve_reviews_total{verdict="fail"} 1.0' in metrics.exposition()
