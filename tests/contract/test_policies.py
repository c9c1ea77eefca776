"""Policies decide when and where an image is judged, never what its verdict is: the same images through each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from daemon.policy.presets import PRESETS
from tests.contract.client import Line
from tests.daemon.dispatch.replaying import replay
from tests.lines import RULES, a_jpeg

IMAGES = 36
#: Confidences of one image differ by rounding: other batches are other sums.
TOLERANCE = 1e-3
BOARD = {"type": "open-board", "serial": "S1"}
#: By image: its verdict and defect, then each stage's label and confidence.
Verdicts = Mapping[str, tuple[Any, ...]]


def run(folder: Path, experts: Path, policy: str) -> Verdicts:
    """Two executors with memory for one classifier and the detector each: every policy must switch."""
    devices = {"cpu": {"expert_memory": "120MB", "executors": 2, "max_batch": 4}}
    line = Line(folder, experts, RULES, policy=policy, record="trace.jsonl", devices=devices)
    with line.service():
        with line.peer() as peer:
            for number in range(IMAGES):
                component = ("R0402", "C0603", "QFP64")[number % 3]
                header = line.inspect(board=BOARD, component=component, designator=f"X{number}")
                assert peer.ask(header, a_jpeg(number))["type"] == "accepted"
        line.idle()
        status = line.status()
    shares = {row["budget_bytes"] for row in status["executors"]}
    assert shares == {60_000_000 if PRESETS[policy].own_pools else 120_000_000}
    assert all(row["used_bytes"] <= row["budget_bytes"] for row in status["executors"])
    assert status["expert_switches"] >= 1
    stages = "SELECT label, confidence FROM stages WHERE inspection_id = ? ORDER BY step"
    images = line.rows("SELECT inspection_id, image_id, verdict, defect FROM inspections")
    return {image: (*verdict, line.rows(stages, key)) for key, image, *verdict in images}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Verdicts:
    return run(tmp_path_factory.mktemp("policies") / "line", experts_folder, "coserve-plus")


#: One executor with every image, and a pool for each executor: the first and the last of the paper's policies.
USUAL = ("samba", "coserve")
OTHERS = [name for name in PRESETS if name not in {*USUAL, "coserve-plus"}]


@pytest.mark.parametrize("policy", [*USUAL, *(pytest.param(name, marks=pytest.mark.test_all) for name in OTHERS)])
def test_verdicts_are_the_same_whatever_the_policy(
    tmp_path: Path, experts_folder: Path, policy: str, expected: Verdicts
) -> None:
    verdicts = run(tmp_path / "line", experts_folder, policy)
    assert verdicts.keys() == expected.keys()
    assert len(verdicts) == IMAGES
    for image, (verdict, defect, stages) in verdicts.items():
        as_verdict, as_defect, as_stages = expected[image]
        assert (verdict, defect) == (as_verdict, as_defect), image
        assert [label for label, _ in stages] == [label for label, _ in as_stages], image
        confidences = [confidence or 0.0 for _, confidence in stages]
        assert confidences == pytest.approx([confidence or 0.0 for _, confidence in as_stages], abs=TOLERANCE), image
    assert replay(tmp_path / "line" / "trace.jsonl") == []
