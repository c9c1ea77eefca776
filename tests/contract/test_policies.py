"""Policies decide when and where an image is judged, never what its verdict is: the same images through each."""

import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from coserve_client import CameraImage, Publisher, publish_images
from daemon.dispatch.trace import replay
from daemon.policy.presets import PRESETS
from daemon.wire.control import ask
from tests.lines import a_jpeg, a_line
from tests.simulated import a_service
from tests.waiting import PATIENCE_S

IMAGES = 36
#: Confidences of one image differ by rounding: other batches are other sums.
TOLERANCE = 1e-3
#: By image: its verdict and defect, then each stage's label and confidence.
Found = Mapping[str, tuple[Any, ...]]


def images() -> list[CameraImage]:
    components = ("R0402", "C0603", "QFP64")
    board = {"type": "open-board", "serial": "S1"}
    return [CameraImage(str(n), a_jpeg(n), board, components[n % 3], {"designator": f"X{n}"}) for n in range(IMAGES)]


def run(folder: Path, experts: Path, policy: str) -> Found:
    """Two executors with memory for one classifier and the detector each: every policy must switch."""
    path = a_line(folder, experts, policy=policy, record="trace.jsonl")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings["devices"] = {"cpu": {"expert_memory": "120MB", "executors": 2, "max_batch": 4}}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    control = f"ipc://{folder}/run/control.sock"
    with a_service(path, folder / "daemon.log"):
        with Publisher(f"ipc://{folder}/run/intake.sock", "camera") as publisher:
            assert publish_images(publisher, images()).accepted == IMAGES
        until_s = time.monotonic() + 120.0
        while (status := ask(control, "status", timeout_s=PATIENCE_S))["backlog"]:
            assert time.monotonic() < until_s, status
            time.sleep(0.05)
        shares = {row["budget_bytes"] for row in status["executors"]}
        assert shares == {60_000_000 if PRESETS[policy].own_pools else 120_000_000}
        assert all(row["used_bytes"] <= row["budget_bytes"] for row in status["executors"])
        assert status["expert_switches"] >= 1
    return verdicts(folder / "inspection.db")


def verdicts(database: Path) -> Found:
    stages = "SELECT label, confidence FROM stages WHERE inspection_id = ? ORDER BY step"
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as store:
        rows = store.execute("SELECT inspection_id, image_id, verdict, defect FROM inspections").fetchall()
        return {image: (*judged, store.execute(stages, [key]).fetchall()) for key, image, *judged in rows}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Found:
    return run(tmp_path_factory.mktemp("policies") / "line", experts_folder, "coserve-plus")


@pytest.mark.parametrize("policy", [name for name in PRESETS if name != "coserve-plus"])
def test_verdicts_are_the_same_whatever_the_policy(
    tmp_path: Path, experts_folder: Path, policy: str, expected: Found
) -> None:
    found = run(tmp_path / "line", experts_folder, policy)
    assert found.keys() == expected.keys()
    assert len(found) == IMAGES
    for image, (verdict, defect, stages) in found.items():
        as_verdict, as_defect, as_stages = expected[image]
        assert (verdict, defect) == (as_verdict, as_defect), image
        assert [label for label, _ in stages] == [label for label, _ in as_stages], image
        confidences = [confidence or 0.0 for _, confidence in stages]
        assert confidences == pytest.approx([confidence or 0.0 for _, confidence in as_stages], abs=TOLERANCE), image
    assert list(replay(tmp_path / "line" / "trace.jsonl")) == []
