"""The benchmark of the pages on a line of three small experts: both sides really run, and the pages really listen."""

from pathlib import Path

import pytest

from coserve_client import CameraImage
from tests.bench.dashboard import compare
from tests.lines import a_jpeg, a_line

pytestmark = pytest.mark.test_all


def test_a_line_with_pages_and_one_without_judge_the_same_images_and_the_pages_hear_of_it(
    tmp_path: Path, torch_experts_folder: Path
) -> None:
    pytest.importorskip("fastapi", reason="needs the extra dashboard")
    config = a_line(tmp_path / "line", torch_experts_folder)
    board = {"type": "open-board", "serial": "S1"}
    images = [CameraImage(f"i{n}", a_jpeg(n), board, "R0402", {"designator": f"R{n}"}) for n in range(200)]
    figures = compare(config, images, readers=3, rounds=1)
    assert (figures["images"], figures["readers"], len(figures["ratios"])) == (200, 3, 1)
    assert figures["with"] > 0
    assert figures["ratio"] == pytest.approx(figures["with"] / figures["without"], rel=0.01)
    assert {run["images"] for runs in figures["runs"].values() for run in runs} == {200}
    assert figures["events"] > 3
