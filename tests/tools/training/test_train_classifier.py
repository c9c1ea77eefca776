import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml

from experts.catalog import CatalogFile, resolve
from experts.spec import ExpertId
from experts.vision.infer import infer
from experts.vision.preprocess import fit as fit_image
from experts.vision.slot import SlotPool
from tools.training import TrainingError, fit
from tools.training.classifier import train_classifier
from tools.training.fit import Schedule

torch.set_num_threads(1)

COLOURS = {"blue": (40, 60, 220), "red": (220, 60, 40)}
QUICK = Schedule(epochs=6, batch=8, learning_rate=3e-3)


def a_square(label: str, seed: int, size: int = 32) -> np.ndarray:
    """(size, size, 3) uint8 RGB: a coloured square with noise."""
    noise = np.random.default_rng(seed).normal(0, 12, (size, size, 3))
    return np.clip(np.asarray(COLOURS[label]) + noise, 0, 255).astype(np.uint8)


def a_folder(root: Path, counts: dict[str, int] | None = None) -> Path:
    for label, count in (counts or {"red": 10, "blue": 10}).items():
        (root / label).mkdir(parents=True)
        for seed in range(count):
            picture = cv2.cvtColor(a_square(label, seed), cv2.COLOR_RGB2BGR)
            cv2.imwrite(str(root / label / f"{seed}.png"), picture)
    return root


def some_pictures(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of the two colours, in turn, and which of them each is (0 blue, 1 red)."""
    labels = list(COLOURS)
    pictures = np.stack([a_square(labels[n % 2], seed + n) for n in range(count)])
    return pictures, np.arange(count) % 2


def train(folder: Path, out: Path, **options):
    fields = {"expert": "squares", "schedule": QUICK, "threads": 1, **options}
    return train_classifier(folder, fields.pop("architecture", "resnet18"), 32, out, **fields)


def refusal(folder: Path, **options) -> str:
    out = folder.parent / "out"
    with pytest.raises(TrainingError) as caught:
        train(folder, out, **options)
    assert not out.exists(), "a refused training wrote something"
    return str(caught.value)


def test_a_folder_of_labelled_images_becomes_an_expert_that_answers_their_labels(tmp_path: Path):
    shares: list[float] = []
    report = train(a_folder(tmp_path / "squares"), tmp_path / "experts", on_progress=shares.append)
    assert report.accuracy == 1.0
    assert [(label.label, label.held_out, label.right) for label in report.labels] == [("blue", 2, 2), ("red", 2, 2)]
    assert (report.trained, report.file) == (16, tmp_path / "experts" / "squares.safetensors")
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    document = yaml.safe_load((tmp_path / "experts" / "catalog.yaml").read_text(encoding="utf-8"))
    catalog, problems = resolve(CatalogFile.model_validate(document), tmp_path / "experts")
    assert problems == []
    spec = catalog[ExpertId("squares")]
    assert (spec.classes, spec.input_size, spec.temperature) == (("blue", "red"), 32, report.temperature)
    pool = SlotPool("cpu", spec.weights_bytes)
    pool.load(spec)
    unseen = [a_square(label, 900 + n, size) for n, (label, size) in enumerate((("red", 32), ("blue", 50)))]
    answers = infer(pool.slot(spec.expert), [fit_image(picture, "classify", 32) for picture in unseen])
    assert [answer.label for answer in answers] == ["red", "blue"]


def test_training_again_with_the_same_seed_gives_the_same_weights(tmp_path: Path):
    folder, one_epoch = a_folder(tmp_path / "squares", {"red": 3, "blue": 3}), Schedule(epochs=1)
    one, same = (train(folder, tmp_path / name, schedule=one_epoch).file.read_bytes() for name in ("a", "b"))
    assert one == same


def test_a_rare_label_is_held_out_and_learned_too(tmp_path: Path):
    report = train(a_folder(tmp_path / "squares", {"red": 16, "blue": 2}), tmp_path / "experts")
    assert {label.label: label.held_out for label in report.labels} == {"red": 3, "blue": 1}
    assert report.accuracy == 1.0


def test_folders_that_cannot_be_trained_on_are_named_with_what_to_do(tmp_path: Path):
    lonely = refusal(a_folder(tmp_path / "lonely", {"red": 4}))
    assert str(tmp_path / "lonely") in lonely
    assert "two at least" in lonely
    assert "['red']" in lonely
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")
    few = refusal(a_folder(tmp_path / "few", {"red": 4, "blue": 1}))
    assert str(tmp_path / "few" / "blue") in few
    assert "holds 1 image, two at least are needed" in few


def test_an_unreadable_image_is_named(tmp_path: Path):
    folder = a_folder(tmp_path / "squares", {"red": 3, "blue": 3})
    (folder / "red" / "torn.png").write_bytes((folder / "red" / "0.png").read_bytes()[:60])
    said = refusal(folder)
    assert str(folder / "red" / "torn.png") in said
    assert "take it out of the folder" in said


def test_what_cannot_be_an_expert_is_said_before_training(tmp_path: Path):
    folder = a_folder(tmp_path / "squares", {"red": 2, "blue": 2})
    shares: list[float] = []
    assert "expected resnet18" in refusal(folder, architecture="yolo11n", on_progress=shares.append)
    assert "--id" in refusal(folder, expert="my squares", on_progress=shares.append)
    assert shares == []


def test_overconfident_logits_get_a_higher_temperature():
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 2, 400)
    said = np.where(rng.random(400) < 0.2, 1 - targets, targets)  # wrong in one of five
    modest = torch.from_numpy(np.eye(2)[said] * np.log(4)).float()  # says 0.8, and is right in 0.8
    assert fit.calibrate(modest, targets) == pytest.approx(1.0, abs=0.2)
    assert fit.calibrate(modest * 3, targets) == pytest.approx(3.0, rel=0.2)
    assert fit.calibrate(modest * 3, targets) > fit.calibrate(modest, targets)


def test_an_expert_keeps_the_early_layers_of_its_backbone_and_learns_in_the_last():
    torch.manual_seed(3)
    pictures, targets = some_pictures(16)
    backbone = fit.fit_network(fit.new_network("resnet18", 3), pictures, targets, Schedule(epochs=2, batch=8))
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    expert = fit.fit_expert(backbone, pictures, targets, [2, 0], Schedule(epochs=3, batch=8))
    after = expert.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    early = [name for name in after if not name.startswith(("layer4", "fc"))]
    assert early
    assert all(torch.equal(after[name], before[name]) for name in early)
    assert not torch.equal(after["layer4.1.conv2.weight"], before["layer4.1.conv2.weight"])
    assert after["fc.weight"].shape == (2, 512)
    assert not expert.training
    unseen, wanted = some_pictures(8, seed=500)
    assert fit.logits_of(expert, unseen).argmax(1).tolist() == wanted.tolist()


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_training_may_be_as_short_as_one_step(steps: int):
    pictures, targets = np.zeros((2, 64, 64, 3), np.uint8), np.zeros(2, np.int64)
    said: list[float] = []
    fit.fit_network(fit.new_network("resnet18", 2), pictures, targets, Schedule(epochs=steps), said.append)
    assert said == [step / steps for step in range(1, steps + 1)]


def test_logits_of_no_pictures_are_none():
    assert fit.logits_of(torch.nn.Identity(), np.zeros((0, 32, 32, 3), np.uint8)).shape[0] == 0


def test_too_few_pictures_held_out_are_said_so_and_the_expert_is_written(tmp_path: Path):
    folder = a_folder(tmp_path / "squares", {"red": 5, "blue": 50})
    words = ["train", "classifier", str(folder), "--input-size", "32", "--epochs", "3", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "tools", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "too few pictures held out to know how good it is: red 1, and fewer than 10 say little" in done.stderr
    assert "blue" not in done.stderr
    assert (tmp_path / "out/catalog.yaml").is_file()
