"""Files as people save trained networks. Weights are zeros of one number, seen as large: such files are small.

The test that names architectures takes 3 s: it imports ultralytics and builds networks until one fits.
"""

import argparse
import builtins
import contextlib
import functools
import os
import re
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
from tools.training.checkpoint import Checkpoint, read_checkpoint, weights_for

RESNET18 = ARCHITECTURES["resnet18"]


def zeros(source: str, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: changed.get(name, torch.zeros(()).expand(shape)) for name, shape in weight_shapes(source).items()}


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
        "compiled and parallel": {"model_state_dict": named("_orig_mod.module.")},
        "a compiled part": {name.replace("layer1.", "layer1._orig_mod."): tensor for name, tensor in best.items()},
        "Lightning": {"state_dict": {**named("model.backbone."), "criterion.weight": torch.ones(2)}, "callbacks": {}},
        "averaged by torch": averaged,
        "averaged beside the last": {"model": plain(), "model_ema": averaged},
        "averaged beside the last, by timm": {"state_dict": plain(), "state_dict_ema": best, "optimizer": optimizer},
        "averaged by ema_pytorch": {**named("online_model.", plain()), **named("ema_model."), "step": torch.tensor(3)},
        "half": of(torch.float16),
        "float64": of(torch.float64),
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


def test_a_file_is_known_by_its_content_and_not_by_its_name(tmp_path: Path):
    file = a_file(tmp_path, {"model": plain(), "epoch": 3}, "a.safetensors", _use_new_zipfile_serialization=False)
    assert weights_for(RESNET18, read_checkpoint(file), file).keys() == plain().keys()
    save_file({"fc.weight": torch.zeros(2, 3)}, tmp_path / "a.pth")
    assert read_checkpoint(tmp_path / "a.pth").tensors.keys() == {"fc.weight"}


class Runs:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_that_a_file_names_runs_while_it_is_read(tmp_path: Path, zipped: bool):
    trace = tmp_path / "it-ran"
    touch = f"open({str(trace)!r}, 'w')"
    for program in (Runs(eval, touch), Runs(os.system, f"touch {trace}"), Runs(builtins.map, Runs(eval, touch), [1])):
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
        torch.save({"epoch": 9, "model": network}, file)
    text = refusal(file)
    assert kind in text
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"python -c '(.*)'", text)[1], {})  # noqa: S102  # the advice
    assert weights_for(RESNET18, read_checkpoint(tmp_path / "weights.pth"), file).keys() == plain().keys()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x08\x07\x12\x07pytorch\x1a\x052.1.0:", "is an ONNX graph, not weights of torch: where it was trained"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"\x1f\x8b\x08", "(packed, cut, damaged?): unpack it, copy it again, or where it was trained, save"),
        (b"", "is no whole file of torch.save or safetensors"),
    ],
)
def test_a_file_of_another_program_is_refused_with_what_to_do(tmp_path: Path, content: bytes, said: str):
    (tmp_path / "a.pth").write_bytes(content)
    assert said in refusal(tmp_path / "a.pth")


@pytest.mark.parametrize(
    ("source", "changed", "said"),
    [
        ("resnet34", {}, "holds the weights of a resnet34, not of a resnet18: name --architecture resnet34"),
        ("yolov5s.yaml", {}, "of a yolov5s, not of a resnet18: name --architecture yolov5s"),
        ("mobilenet_v2", {}, "conv1.weight is missing among features.0.0.weight"),
        ("resnet18", {"conv1.weight": torch.zeros(64, 3, 3, 3)}, "is 64 x 3 x 3 x 3, expected 64 x 3 x 7 x 7; train"),
        ("resnet18", {"conv1.weight": torch.zeros(64, 4, 7, 7)}, "takes 4 channels"),
        ("resnet18", {"fc.scale": torch.tensor(3.0)}, "its last layer is fc.bias, fc.scale, fc.weight"),
        (
            "resnet18",
            {"fc.0.weight": torch.zeros(9, 512), "fc.2.weight": torch.zeros(2, 9)},
            "one Linear (fc) is taken",
        ),
    ],
)
def test_weights_of_another_network_are_refused_with_its_name_or_the_first_difference(
    tmp_path: Path, source: str, changed: dict[str, torch.Tensor], said: str
):
    assert said in refusal(a_file(tmp_path, zeros(source) | changed))


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
    for kind in ("SegmentationModel", "OBBModel", "ClassificationModel"):
        with pytest.raises(TrainingError, match=f"holds ultralytics' {kind}, .*: train a detector"):
            weights_for(ARCHITECTURES["yolo11n"], Checkpoint({}, f"ultralytics.nn.tasks.{kind}"), tmp_path)
