"""Files as people save trained networks. Weights are zeros of one number, seen as large: such files are small."""

import argparse
import builtins
import contextlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from experts.vision.architectures import ARCHITECTURES
from experts.vision.networks import weight_shapes
from tools.training import TrainingError
from tools.training.checkpoint import class_names, read_checkpoint, refuse_whole, weights_for

RESNET18 = ARCHITECTURES["resnet18"]


def zeros(source: str, prefix: str = "", **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    shapes = weight_shapes(source)
    return {f"{prefix}{name}": changed.get(name, torch.zeros(1).expand(shape)) for name, shape in shapes.items()}


def a_file(folder: Path, content: object, name: str = "trained.pth", **form) -> Path:
    torch.save(content, folder / name, **form)
    return folder / name


def refusal(file: Path, architecture: str = "resnet18") -> str:
    with pytest.raises(TrainingError) as caught:
        weights_for(ARCHITECTURES[architecture], read_checkpoint(file), file)
    return str(caught.value)


MARK = torch.ones(1).expand(64)
STATE = zeros("resnet18")
BEST = {**STATE, "bn1.weight": MARK}
OPTIMIZER = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}


def prefixed(prefix: str, state: dict[str, torch.Tensor] = BEST) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


SAVED = {
    "alone": BEST,
    "torchvision's reference": {"model": BEST, "optimizer": OPTIMIZER, "epoch": 9, "args": argparse.Namespace(lr=0.1)},
    "ImageNet example": {"arch": "resnet18", "state_dict": prefixed("module."), "best_acc1": np.float64(97.5)},
    "beside its own things": {**BEST, "epoch": 3, "history": np.arange(3), "folder": Path("/data")},
    "compiled and parallel": {"model_state_dict": prefixed("_orig_mod.module.")},
    "a compiled part": {name.replace("layer1.", "layer1._orig_mod."): tensor for name, tensor in BEST.items()},
    "net.": prefixed("net."),
    "Lightning": {"state_dict": {**prefixed("model.backbone."), "criterion.weight": torch.ones(2)}, "callbacks": {}},
    "averaged, of torch": {"n_averaged": torch.tensor(7), **prefixed("module.")},
    "averaged beside the last": {"model": STATE, "model_ema": {"n_averaged": torch.tensor(7), **prefixed("module.")}},
    "averaged by timm": {"state_dict": STATE, "state_dict_ema": BEST, "optimizer": OPTIMIZER},
    "averaged by ema_pytorch": {**prefixed("online_model.", STATE), **prefixed("ema_model."), "step": torch.tensor(3)},
    "half": {name: tensor.half() for name, tensor in BEST.items()},
    "float64": {name: tensor.double() for name, tensor in BEST.items()},
    "with more counters": {**BEST, "old.num_batches_tracked": torch.tensor(1)},
    "Dropout and Linear": {name.replace("fc.", "fc.1."): tensor for name, tensor in BEST.items()},
    "no bias": {name: tensor for name, tensor in BEST.items() if name != "fc.bias"},
}


@pytest.mark.parametrize("how", SAVED)
def test_weights_are_found_in_a_checkpoint_however_people_save_it(tmp_path: Path, how: str):
    checkpoint = read_checkpoint(a_file(tmp_path, SAVED[how]))
    weights = weights_for(RESNET18, checkpoint, tmp_path)
    assert weights.keys() == STATE.keys()
    assert float(weights["bn1.weight"].float().sum()) == 64
    assert (checkpoint.note is not None) == (how in {"averaged beside the last", "averaged by timm"})


@pytest.mark.parametrize("name", ["trained.pth", "trained.safetensors"])
def test_a_file_is_known_by_its_content_and_not_by_its_name(tmp_path: Path, name: str):
    torch.save({"model": STATE, "epoch": 3}, tmp_path / name, _use_new_zipfile_serialization=False)
    assert weights_for(RESNET18, read_checkpoint(tmp_path / name), tmp_path).keys() == STATE.keys()
    a_file(tmp_path, STATE, name)
    assert weights_for(RESNET18, read_checkpoint(tmp_path / name), tmp_path).keys() == STATE.keys()
    save_file({"fc.weight": torch.zeros(2, 3)}, tmp_path / name)
    assert read_checkpoint(tmp_path / name).tensors.keys() == {"fc.weight"}


class Runs:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_that_a_file_names_runs_while_it_is_read(tmp_path: Path, zipped: bool):
    trace = tmp_path / "it-ran"
    touch = f"open({str(trace)!r}, 'w')"
    for program in (
        Runs(eval, touch),
        Runs(os.system, f"touch {trace}"),
        Runs(subprocess.Popen, ["touch", str(trace)]),
        Runs(Path.touch, trace),
        Runs(builtins.map, Runs(eval, touch), [1]),
    ):
        for state in (STATE, program):
            file = a_file(tmp_path, {"state_dict": state, "more": program}, _use_new_zipfile_serialization=zipped)
            with contextlib.suppress(TrainingError):
                read_checkpoint(file)
        assert "--trust" not in refusal(file)
    assert not trace.exists()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(images)


@pytest.mark.parametrize("kind", ["TorchScript program", "whole pickled network"])
def test_the_advice_for_a_program_gives_weights_that_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    file = tmp_path / "net.pt"
    if kind == "TorchScript program":
        torch.jit.save(torch.jit.trace(Net(), torch.rand(1, 2)), str(file))
        text = refusal(file)
    else:
        checkpoint = read_checkpoint(a_file(tmp_path, Net(), file.name))
        assert checkpoint.pickled == f"{__name__}.Net"
        with pytest.raises(TrainingError) as caught:
            refuse_whole(file, checkpoint.pickled)
        text = str(caught.value)
    assert kind in text
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"python -c '(.*)'", text)[1], {})  # noqa: S102  # the advice
    assert read_checkpoint(tmp_path / "weights.pth").tensors.keys() == {"fc.weight", "fc.bias"}


def test_files_of_other_programs_are_named(tmp_path: Path):
    for start, expected in {
        b"\x08\x07\x12\x07pytorch\x1a\x052.1.0:": "is an ONNX graph",
        b"\x89HDF\r\n": "Keras or HDF5",
        b"version https://git-lfs.github.com/spec/v1": "git lfs pull",
        b"<!DOCTYPE html>": "is a web page",
        b"\x1f\x8b\x08": "unpack it",
        b"": "is damaged, cut or not written by torch.save",
    }.items():
        (tmp_path / "a.pth").write_bytes(start)
        assert expected in refusal(tmp_path / "a.pth")
    assert "holds several networks (student, teacher)" in refusal(
        a_file(tmp_path, {"student": STATE, "teacher": STATE})
    )


def test_weights_of_another_architecture_are_refused_by_its_name(tmp_path: Path):
    assert "holds the weights of a resnet34, not of a resnet18: name --architecture resnet34" in refusal(
        a_file(tmp_path, zeros("resnet34"))
    )
    assert "of a yolov5s, not of a yolov5n: name --architecture yolov5s" in refusal(
        a_file(tmp_path, zeros("yolov5s.yaml")), "yolov5n"
    )
    assert "of a resnext50_32x4d, which no expert can be" in refusal(
        a_file(tmp_path, zeros("resnext50_32x4d")), "resnet50"
    )
    assert "conv1.weight is missing among features.0.0.weight" in refusal(
        a_file(tmp_path, {"features.0.0.weight": torch.zeros(1)})
    )
    stem = zeros("resnet18", **{"conv1.weight": torch.zeros(64, 3, 3, 3)})
    assert "conv1.weight is 64 x 3 x 3 x 3, expected 64 x 3 x 7 x 7" in refusal(a_file(tmp_path, stem))
    four = zeros("resnet18", **{"conv1.weight": torch.zeros(64, 4, 7, 7)})
    assert "takes 4 channels" in refusal(a_file(tmp_path, four))
    two = {**STATE, "fc.0.weight": torch.zeros(9, 512), "fc.2.weight": torch.zeros(2, 9)}
    assert "one Linear is taken" in refusal(a_file(tmp_path, two))


def test_a_pickled_network_that_no_expert_can_be_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = types.ModuleType("models.yolo")
    old.Model = type("Model", (nn.Module,), {"__module__": "models.yolo"})
    monkeypatch.setitem(sys.modules, "models", types.ModuleType("models"))
    monkeypatch.setitem(sys.modules, "models.yolo", old)
    checkpoint = read_checkpoint(a_file(tmp_path, {"model": old.Model(), "ema": None}))
    for pickled, expected in {
        checkpoint.pickled: "old YOLOv5's or YOLOv7's own repository (models.yolo.Model)",
        "ultralytics.nn.tasks.SegmentationModel": "holds ultralytics' SegmentationModel",
        "ultralytics.nn.tasks.OBBModel": "train a detection model on boxes",
        "ultralytics.nn.tasks.ClassificationModel": "coserve train classifier FOLDER",
    }.items():
        with pytest.raises(TrainingError, match=re.escape(expected)):
            refuse_whole(tmp_path / "best.pt", pickled)
    refuse_whole(tmp_path / "best.pt", "ultralytics.nn.tasks.DetectionModel")


def test_names_of_classes_come_in_the_networks_order_and_mistakes_are_said():
    assert class_names({str(number): f"c{number}" for number in (10, *range(10))})[0][9:] == ["c9", "c10"]
    assert class_names({"ok": 1, "missing": 0}) == (["missing", "ok"], None)
    assert class_names({"0603": 1, "0402": 0}) == (["0402", "0603"], None)
    assert class_names({0: 402, 1: "void"}) == (["402", "void"], None)
    assert class_names(["bridge", "void"]) == (["bridge", "void"], None)
    for names, mistake in (
        ({0: False, 1: "void"}, "class 0 False, which YAML makes of NO"),
        (["bridge", "bridge"], "classes 0 and 1 both bridge"),
        ({0: "bridge", 2: "void"}, "cannot be read"),
        (["", "void"], "a name has 1 to 128 characters"),
    ):
        assert mistake in str(class_names(names)[1])
