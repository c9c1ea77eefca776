"""The DeepPCB example: a few drawn tiles of the data set's form, from the folder to a line that is measured."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from routing_rules.examples.deeppcb import deeppcb
from tests import ROOT
from tools.training.classifier import TrainingPlan, train_classifier
from tools.training.detector import train_detector
from tools.training.detector_loop import TrainingEffort
from tools.training.fit import Schedule
from tools.training.labelled import read_yolo_data

pytestmark = pytest.mark.not_fast("computes with torch")

RULES = ROOT / "routing_rules/examples/deeppcb/rules.yaml"
CONFIG = "rules: rules.yaml\ncatalog: experts/catalog.yaml\ndevices: {cpu: {expert_memory: 400MB}}\n"


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    """Ten tiles to train on, the last of them held out, and one to measure, each with a pin-hole and a short."""
    folder = tmp_path / "DeepPCB"
    template = np.full((640, 640), 255, np.uint8)
    template[:, 48:96] = template[:, 400:600] = 0
    tested = template.copy()
    tested[100:110, 500:508] = 255
    tested[310:330, 96:120] = 0
    tiles = [f"group{1 + number % 2}/{number}" for number in range(1, 12)]
    for number, tile in enumerate(tiles):
        (folder / tile).parent.mkdir(parents=True, exist_ok=True)
        tested[600 : 603 + 3 * number, 200:210] = template[600 : 603 + 3 * number, 200:210] = 0
        cv2.imwrite(str(folder / f"{tile}_temp.jpg"), template)
        cv2.imwrite(str(folder / f"{tile}_test.jpg"), tested)
        (folder / f"{tile}.txt").write_text("490 90 518 120 6\n90 300 126 340 2\n", encoding="utf-8")
    (folder / "train.txt").write_text("\n".join(tiles[:10]), encoding="utf-8")
    (folder / "val.txt").write_text(tiles[10], encoding="utf-8")
    return folder


def test_the_data_set_becomes_boards_and_labels_and_its_validation_stays_apart(data_set: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    deeppcb.main(["prepare", str(data_set), str(data)])
    assert sorted(str(path.relative_to(data / "boards")) for path in (data / "boards").rglob("*.png")) == [
        "bare-board/11-repaired/T1.tile.png",
        "bare-board/11/T1.tile.png",
    ]
    labelled = read_yolo_data(data / "detector/data.yaml")
    assert len(labelled.train) == 9
    assert sorted(path.name for path in (data / "classifier").iterdir()) == ["group1", "group2"]
    assert [photograph.file.stem for photograph in labelled.held_out] == ["10"], "for the threshold"
    assert [photograph.file.stem for photograph in read_yolo_data(data / "detector/test.yaml").held_out] == ["11"]


@pytest.mark.test_all
def test_the_example_runs_from_the_data_set_to_a_measured_line(
    data_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, line = tmp_path / "data", tmp_path / "line"
    torch.set_num_threads(1)
    deeppcb.main(["prepare", str(data_set), str(data)])
    plan = TrainingPlan(Schedule(epochs=1), architecture="resnet18", input_size=32)
    train_classifier(data / "classifier", line / "experts", expert="tile", plan=plan)
    effort = TrainingEffort(steps=1, batch=2, threads=1)
    train_detector(data / "detector/data.yaml", "yolo11n", 64, line / "experts", expert=deeppcb.DETECTOR, effort=effort)
    (line / "rules.yaml").write_bytes(RULES.read_bytes())
    (line / "coserve.yaml").write_text(CONFIG, encoding="utf-8")
    capsys.readouterr()
    deeppcb.main(["measure", str(data), str(line)])
    output = " ".join(capsys.readouterr().out.split())
    assert "Verdicts of the line" in output
    assert "repaired" in output
    assert "│ pin-hole │ 1 │" in output
    assert "│ all │ 2 │" in output
