"""From the camera to the training folder: a line without experts collects pictures, and gives them back by label."""

import json
from pathlib import Path

import pytest

from coserve_client import Publisher
from daemon.check import check_line
from tests.contract.client import Line
from tests.lines import a_jpeg
from tests.tools.run_commands import coserve
from tools.terminal.names import file_name

RULES = """\
boards:
  main: {components: {R0402: [R1, R2, R3], "QFP/64": [U1]}}
classifiers:
  "*": {expert: "{component}", pass: [ok, odd], review_below: 0.5}
defects: {tombstone: D101}
"""
IMAGES = {"R1": "R0402", "R2": "R0402", "R3": "R0402", "U1": "QFP/64"}


@pytest.fixture
def line(tmp_path: Path, experts_folder: Path) -> Line:
    """A line whose catalog is still empty."""
    line = Line(tmp_path / "line", experts_folder, RULES)
    line.catalog.write_text("experts: {}\n", encoding="utf-8")
    return line


def test_a_line_without_experts_collects_pictures_for_training(line: Line) -> None:
    problems, facts = check_line(line.config)
    assert (problems, "the catalog has no experts" in facts["warnings"][0]) == ([], True)
    with line.service():
        with Publisher(line.intake, source="camera") as publisher:
            for number, (designator, component) in enumerate(IMAGES.items()):
                board = {"type": "main", "serial": "S1"}
                publisher.send(designator, a_jpeg(number), board=board, component=component, designator=designator)
            assert publisher.finish().accepted == len(IMAGES)
        line.idle()
        line.wait(lambda: line.rows("SELECT count(image_path) FROM inspections") == [(len(IMAGES),)])
        assert line.rows("SELECT DISTINCT verdict, reason FROM inspections") == [("unknown", "no_expert")]
        for image, fields in ((1, {"verdict": "pass"}), (2, {"verdict": "fail", "defect": "D101"})):
            line.review(inspection_id=image, reviewer="eva", **fields)
    assert "no_experts" in line.log()
    out = line.folder / "training"
    words = ["dataset", "export", "--serial", "S1", "--format", "folders", "--out", out, "--config", line.config]
    assert [tuple(row.values()) for row in json.loads(coserve(*words, "--json").stdout)["pictures"]] == [
        ("QFP/64", "unsorted", 1),
        ("R0402", "ok", 1),
        ("R0402", "tombstone", 1),
        ("R0402", "unsorted", 1),
    ]
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert files == {
        "R0402/ok/1-S1.jpg": a_jpeg(0),
        "R0402/tombstone/2-S1.jpg": a_jpeg(1),
        "unsorted/R0402/3-S1.jpg": a_jpeg(2),
        f"unsorted/{file_name('QFP/64')}/4-S1.jpg": a_jpeg(3),
    }
    coserve(*words, status=2)  # a second time nothing is overwritten
