"""Files as people save trained networks. Weights are zeros of one number, seen as large: such files are small.

The test that names architectures takes 3 s: it imports ultralytics and builds networks until one fits.
"""

import argparse
import builtins
import contextlib
import functools
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
from experts.vision.frameworks import torchvision
from experts.vision.networks import weight_shapes
from tools.training import TrainingError
from tools.training.checkpoint import Checkpoint, class_names, read_checkpoint, weights_for

RESNET18 = ARCHITECTURES["resnet18"]


def zeros(source: str, prefix: str = "", **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    shapes = weight_shapes(source)
    return {f"{prefix}{name}": changed.get(name, torch.zeros(()).expand(shape)) for name, shape in shapes.items()}


def a_file(folder: Path, content: object, name: str = "trained.pth", **form) -> Path:
    torch.save(content, folder / name, **form)
    return folder / name


def refusal(file: Path, architecture: str = "resnet18") -> str:
    with pytest.raises(TrainingError) as caught:
        weights_for(ARCHITECTURES[architecture], read_checkpoint(file), file)
    return str(caught.value)


@functools.cache
def plain() -> dict[str, torch.Tensor]:
    return zeros("resnet18")


def saved_checkpoints() -> dict[str, dict]:
    """Checkpoints by how people save them; those to take have a mark."""
    optimizer = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
    best = {**plain(), "bn1.weight": torch.ones(()).expand(64)}

    def named(prefix: str, state: dict[str, torch.Tensor] = best) -> dict[str, torch.Tensor]:
        return {f"{prefix}{name}": tensor for name, tensor in state.items()}

    def of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: tensor[(0,) * tensor.dim()].to(dtype).expand(tensor.shape) for name, tensor in best.items()}

    averaged = {"n_averaged": torch.tensor(7), **named("module.")}
    return {
        "alone": best,
        "torchvision's reference": {"model": best, "optimizer": optimizer, "args": argparse.Namespace(lr=0.1)},
        "ImageNet example": {"arch": "resnet18", "state_dict": named("module."), "best_acc1": np.float64(97.5)},
        "beside its own things": {**best, "epoch": 3, "history": np.arange(3), "folder": Path("/data")},
        "compiled and parallel": {"model_state_dict": named("_orig_mod.module.")},
        "a compiled part": {name.replace("layer1.", "layer1._orig_mod."): tensor for name, tensor in best.items()},
        "net.": named("net."),
        "Lightning": {"state_dict": {**named("model.backbone."), "criterion.weight": torch.ones(2)}, "callbacks": {}},
        "averaged by torch": averaged,
        "averaged beside the last": {"model": plain(), "model_ema": averaged},
        "averaged beside the last, by timm": {"state_dict": plain(), "state_dict_ema": best, "optimizer": optimizer},
        "averaged by ema_pytorch": {**named("online_model.", plain()), **named("ema_model."), "step": torch.tensor(3)},
        "half": of(torch.float16),
        "bfloat16": of(torch.bfloat16),
        "float64": of(torch.float64),
        "with more counters": {**best, "old.num_batches_tracked": torch.tensor(1)},
        "Dropout and Linear": {name.replace("fc.", "fc.1."): tensor for name, tensor in best.items()},
        "no bias": {name: tensor for name, tensor in best.items() if name != "fc.bias"},
    }


def test_weights_are_found_in_a_checkpoint_however_people_save_it(tmp_path: Path):
    for how, content in saved_checkpoints().items():
        checkpoint = read_checkpoint(a_file(tmp_path, content))
        weights = weights_for(RESNET18, checkpoint, tmp_path)
        assert weights.keys() == plain().keys(), how
        assert float(weights["bn1.weight"].float().sum()) == 64, how
        assert (checkpoint.note is not None) == ("beside the last" in how), how


@pytest.mark.parametrize("name", ["trained.pth", "trained.safetensors"])
def test_a_file_is_known_by_its_content_and_not_by_its_name(tmp_path: Path, name: str):
    torch.save({"model": plain(), "epoch": 3}, tmp_path / name, _use_new_zipfile_serialization=False)
    assert weights_for(RESNET18, read_checkpoint(tmp_path / name), tmp_path).keys() == plain().keys()
    a_file(tmp_path, plain(), name)
    assert weights_for(RESNET18, read_checkpoint(tmp_path / name), tmp_path).keys() == plain().keys()
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
        for state in (plain(), program):
            file = a_file(tmp_path, {"state_dict": state, "more": program}, _use_new_zipfile_serialization=zipped)
            with contextlib.suppress(TrainingError):
                read_checkpoint(file)
        assert "--trust" not in refusal(file)
    assert not trace.exists()


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
@pytest.mark.parametrize("kind", ["TorchScript program", "whole pickled network"])
def test_the_advice_for_a_program_gives_weights_that_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    file, network = tmp_path / "net.pt", torchvision().models.resnet18(num_classes=2).eval()
    for parameter in network.parameters():
        parameter.data = torch.zeros(()).expand(parameter.shape)
    if kind == "TorchScript program":
        torch.jit.save(torch.jit.trace(network, torch.rand(1, 3, 32, 32)), str(file))
    else:
        torch.save(network, file)
    text = refusal(file)
    assert kind in text
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"python -c '(.*)'", text)[1], {})  # noqa: S102  # the advice
    assert weights_for(RESNET18, read_checkpoint(tmp_path / "weights.pth"), file).keys() == plain().keys()


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
        a_file(tmp_path, {"student": plain(), "teacher": plain()})
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
    two = {**plain(), "fc.0.weight": torch.zeros(9, 512), "fc.2.weight": torch.zeros(2, 9)}
    assert "one Linear is taken" in refusal(a_file(tmp_path, two))


def test_a_pickled_network_that_no_expert_can_be_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = types.ModuleType("models.yolo")
    old.Model = type("Model", (nn.Module,), {"__module__": "models.yolo"})
    monkeypatch.setitem(sys.modules, "models", types.ModuleType("models"))
    monkeypatch.setitem(sys.modules, "models.yolo", old)
    assert "the old YOLOv5's or YOLOv7's own repository (models.yolo.Model)" in refusal(
        a_file(tmp_path, {"model": old.Model(), "ema": None}), "yolov5n"
    )
    for kind, expected in {
        "SegmentationModel": "holds ultralytics' SegmentationModel",
        "OBBModel": "train a detection model on boxes",
        "ClassificationModel": "coserve train classifier FOLDER",
    }.items():
        with pytest.raises(TrainingError, match=expected):
            weights_for(ARCHITECTURES["yolo11n"], Checkpoint({}, f"ultralytics.nn.tasks.{kind}"), tmp_path)


def test_names_of_classes_come_in_the_networks_order_and_mistakes_are_said():
    assert class_names({str(number): f"c{number}" for number in (10, *range(10))})[0][9:] == ["c9", "c10"]
    assert class_names({"ok": 1, "missing": 0}) == (["missing", "ok"], None)
    assert class_names({"0603": 1, "0402": 0}) == (["0402", "0603"], None)
    assert class_names({0: 402, 1: "void"}) == ([402, "void"], None)
    assert class_names(["bridge", "void"]) == (["bridge", "void"], None)
    for names, mistake in (
        ({0: False, 1: "void"}, "class 0 False, which YAML makes of NO"),
        (["bridge", "bridge"], "classes 0 and 1 both bridge"),
        ({0: "bridge", 2: "void"}, "cannot be read"),
        (["", "void"], "a name has 1 to 128 characters"),
    ):
        assert mistake in str(class_names(names)[1])
