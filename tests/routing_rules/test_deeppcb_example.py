"""The DeepPCB example: a few drawn tiles of the data set's form, from the folder to a line that is measured."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from routing_rules.compile import ExpertLabels, compile_rules
from routing_rules.examples.deeppcb import deeppcb
from routing_rules.load import read_yaml
from tests import ROOT
from tools.training.classifier import train_classifier
from tools.training.detector import train_detector
from tools.training.detector_loop import TrainingEffort
from tools.training.fit import Schedule
from tools.training.photographs import read_yolo_data

RULES = ROOT / "routing_rules/examples/deeppcb/rules.yaml"
CONFIG = "rules: rules.yaml\ncatalog: experts/catalog.yaml\ndevices: {cpu: {expert_memory: 400MB}}\n"


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    """Two tiles to train on and one to measure, each with a pin-hole and, across two windows, a short."""
    folder = tmp_path / "DeepPCB"
    (folder / "group1").mkdir(parents=True)
    template = np.full((640, 640), 255, np.uint8)
    template[:, 48:96] = template[:, 400:600] = 0
    tested = template.copy()
    tested[100:110, 500:508] = 255
    tested[310:330, 96:120] = 0
    for name in ("1", "2", "3"):
        cv2.imwrite(str(folder / f"group1/{name}_temp.jpg"), template)
        cv2.imwrite(str(folder / f"group1/{name}_test.jpg"), tested)
        (folder / f"group1/{name}.txt").write_text("490 90 518 120 6\n90 300 126 340 2\n", encoding="utf-8")
    (folder / "train.txt").write_text("group1/1\ngroup1/2\n", encoding="utf-8")
    (folder / "val.txt").write_text("group1/3\n", encoding="utf-8")
    return folder


def test_windows_show_missing_copper_in_cyan_and_additional_copper_in_red(data_set: Path) -> None:
    windows = {window.name: window for window in deeppcb.read_windows(data_set, "val")}
    assert list(windows) == ["3-W1", "3-W2", "3-W3", "3-W4"]
    assert windows["3-W2"].pixels[105, 184].tolist() == pytest.approx([255, 255, 0], abs=30)  # blue, green, red
    assert windows["3-W1"].pixels[315, 108].tolist() == pytest.approx([0, 0, 255], abs=30)
    assert windows["3-W2"].boxes.tolist() == [[170, 90, 198, 120, 5]]
    assert windows["3-W1"].boxes.tolist() == [[90, 300, 126, 320, 1]]
    assert windows["3-W3"].boxes.tolist() == [[90, 0, 126, 20, 1]]
    assert len(windows["3-W4"].boxes) == 0


def test_the_example_runs_from_the_data_set_to_a_measured_line(
    data_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, line = tmp_path / "data", tmp_path / "line"
    torch.set_num_threads(1)
    deeppcb.main(["prepare", str(data_set), str(data)])
    assert sorted(path.name for path in (data / "boards/bare-board/3").iterdir()) == [
        f"W{number}.window.png" for number in (1, 2, 3, 4)
    ]
    assert [len(photograph.boxes) for photograph in read_yolo_data(data / "detector/data.yaml").train] == [
        1,
        1,
        1,
        0,
    ] * 2

    train_classifier(
        data / "classifier", "resnet18", 32, line / "experts", expert="window", schedule=Schedule(epochs=1), threads=1
    )
    effort = TrainingEffort(steps=1, batch=2, threads=1)
    train_detector(data / "detector/data.yaml", "yolo11n", 64, line / "experts", expert=deeppcb.DETECTOR, effort=effort)
    (line / "rules.yaml").write_bytes(RULES.read_bytes())
    (line / "coserve.yaml").write_text(CONFIG, encoding="utf-8")
    capsys.readouterr()
    deeppcb.main(["measure", str(data), str(line)])
    output = " ".join(capsys.readouterr().out.split())
    assert "Verdicts of the line" in output
    assert "board-defects alone, 3 defects, IoU above 0.33: mAP" in output


def test_the_rules_send_suspect_windows_to_the_detector() -> None:
    experts = {"window": ExpertLabels("classify", ("clean", "suspect"))}
    routes = compile_rules(
        read_yaml(RULES), str(RULES), {**experts, deeppcb.DETECTOR: ExpertLabels("detect", deeppcb.LABELS)}
    )
    assert routes.recipes[deeppcb.BOARD_TYPE].expected == 4
    assert [expert for expert, _ in routes.successors["window"]] == [deeppcb.DETECTOR]


@pytest.mark.parametrize(
    ("broken", "content", "message"),
    [
        ("train.txt", None, "name the folder that holds train.txt and val.txt"),
        ("group1/1.txt", "1 2 3\n", "1.txt: expected lines `x1 y1 x2 y2 type`"),
        ("group1/2_test.jpg", "damaged", "2_test.jpg: expected a picture of 640 x 640 pixels"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    data_set: Path, tmp_path: Path, broken: str, content: str | None, message: str
) -> None:
    (data_set / broken).unlink()
    if content is not None:
        (data_set / broken).write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match=message):
        deeppcb.prepare(data_set, tmp_path / "data")
