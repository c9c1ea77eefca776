import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from experts.catalog import CatalogFile, read_catalog, resolve
from experts.spec import ExpertId, ExpertSpec
from experts.vision.preprocess import fit as fit_image
from tests.tools.run_commands import coserve
from tools.experts.measure import answers_of
from tools.terminal.console import CommandError
from tools.training import TrainingError, fit
from tools.training.backbone import BackbonePlan, load_backbone, train_backbone
from tools.training.classifier import TrainingPlan, train_classifier
from tools.training.fit import Schedule
from tools.training.labelled import LabelledPictures, folds
from tools.training.report import report_text

pytestmark = pytest.mark.test_all

torch.set_num_threads(1)

COLOURS = {"blue": (40, 60, 220), "red": (220, 60, 40), "green": (50, 200, 60), "grey": (120, 120, 120)}
QUICK = Schedule(epochs=6, batch=8, learning_rate=3e-3)


def a_square(label: str, seed: int, size: int = 32) -> np.ndarray:
    """(size, size, 3) uint8 RGB: a coloured square with noise."""
    noise = np.random.default_rng(seed).normal(0, 12, (size, size, 3))
    return np.clip(np.asarray(COLOURS[label]) + noise, 0, 255).astype(np.uint8)


def a_folder(
    root: Path,
    counts: Mapping[str, int] = MappingProxyType({"red": 10, "blue": 10}),
    first_seed: int = 0,
    colours: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    for label, count in counts.items():
        (root / label).mkdir(parents=True)
        for seed in range(count):
            square = a_square(colours.get(label, label), first_seed + seed)
            picture = cv2.cvtColor(square, cv2.COLOR_RGB2BGR)
            cv2.imwrite(str(root / label / f"{seed}.png"), picture)
    return root


def some_pictures(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of the two colours, in turn, and which of them each is (0 blue, 1 red)."""
    labels = list(COLOURS)[:2]
    pictures = np.stack([a_square(labels[n % 2], seed + n) for n in range(count)])
    return pictures, np.arange(count) % 2


def train(folder: Path, out: Path, expert: str = "squares", shares: list[float] | None = None, **options: Any):
    plan = TrainingPlan(QUICK, input_size=None if "backbone" in options else 32)
    options.pop("backbone", None)
    on_progress = (shares if shares is not None else list[float]()).append
    return train_classifier(folder, out, expert=expert, plan=replace(plan, **options), on_progress=on_progress)


def refusal(folder: Path, **options: Any) -> str:
    out = folder.parent / "out"
    with pytest.raises(CommandError) as caught:
        train(folder, out, **options)
    assert not out.exists(), "a refused training wrote something"
    return str(caught.value)


def spec_of(out: Path, expert: str = "squares") -> ExpertSpec:
    catalog, problems = resolve(CatalogFile(experts=read_catalog(out / "catalog.yaml")), out)
    assert problems == []
    return catalog[ExpertId(expert)]


def answers(out: Path, pictures: Sequence[np.ndarray], expert: str = "squares") -> list[str | None]:
    spec = spec_of(out, expert)
    return [answer.label for answer in answers_of(spec, [fit_image(each, "classify", 32) for each in pictures])]


def test_a_folder_of_labelled_images_becomes_an_expert_that_answers_their_labels(tmp_path: Path):
    shares: list[float] = []
    longer = replace(QUICK, epochs=14)
    report = train(a_folder(tmp_path / "squares"), tmp_path / "experts", shares=shares, schedule=longer)
    assert (report.chosen.kind, report.file) == ("all-layers", tmp_path / "experts" / "squares.safetensors")
    assert report.chosen.answers.right.mean() >= 0.8, "processors round differently: one in five folds may learn less"
    assert sorted(report.chosen.answers.rows) == list(range(20)), "each picture was held out once"
    assert [note for note in report.notes if "there is no backbone" in note]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    spec = spec_of(tmp_path / "experts")
    assert (spec.classes, spec.input_size, spec.temperature) == (("blue", "red"), 32, report.chosen.temperature)
    unseen = [a_square("red", 900), a_square("blue", 901, 50)]
    assert answers(tmp_path / "experts", unseen) == ["red", "blue"]


def test_folders_that_cannot_be_trained_on_are_named_with_what_to_do(tmp_path: Path):
    lonely = refusal(a_folder(tmp_path / "lonely", {"red": 4}))
    assert str(tmp_path / "lonely") in lonely
    assert "2 at least" in lonely
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")
    few = refusal(a_folder(tmp_path / "few", {"red": 4, "blue": 1}))
    assert f"{tmp_path / 'few' / 'blue'}: holds 1 image, two at least are needed (png" in few
    assert f"(others lie deeper: move them up, or name it instead of {tmp_path})" in refusal(tmp_path)
    cases = a_folder(tmp_path / "cases", {"red": 3, "blue": 3})
    shutil.copytree(cases / "red", cases / "Red")
    assert "red differ only in case or accents: make one folder of them" in refusal(cases)
    assert "has no label green (--good); it has blue, red" in refusal(a_folder(tmp_path / "colours"), good="green")
    shutil.copytree(cases / "blue", tmp_path / "long" / ("b" * 129))
    shutil.copytree(cases / "red", tmp_path / "long" / "red")
    assert "is not a string of 1 to 128 characters" in refusal(tmp_path / "long")
    both = a_folder(tmp_path / "both", {"OK": 3, "good": 3}, colours={"OK": "blue", "good": "red"})
    assert "OK and good both sound as if they pass: name one with --good" in refusal(both)


def test_the_same_picture_under_two_labels_is_named_and_one_that_is_there_twice_is_left_out(tmp_path: Path):
    folder = a_folder(tmp_path / "squares")
    shutil.copy(folder / "red" / "3.png", folder / "red" / "copy.png")
    cv2.imwrite(str(folder / "blue" / "large.png"), a_square("blue", 77, 48)[:, :, ::-1])
    report = train(folder, tmp_path / "experts")
    assert report.data.counts() == {"blue": 11, "red": 10}
    twice, mixed, _ = report.notes[:3]
    assert twice == f"{folder / 'red' / 'copy.png'} is the same picture as 3.png, and is left out"
    assert mixed == f"{folder}: pictures from 32 x 32 to 48 x 48 pixels are all made 32 x 32"
    shutil.copy(folder / "red" / "3.png", folder / "blue" / "again.png")
    said = refusal(folder)
    assert (
        f"{folder / 'blue' / 'again.png'} and {folder / 'red' / '3.png'} are the same picture under two labels" in said
    )


def test_the_last_block_is_trained_and_the_early_layers_stay():
    torch.manual_seed(3)
    pictures, targets = some_pictures(16)
    network = fit.fit_network(fit.new_network("resnet18", 2), pictures, 1 - targets, Schedule(epochs=2, batch=8))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    features = fit.early_features(network, pictures, np.random.default_rng(0))
    after = fit.fit_last_block(network, features, targets, Schedule(epochs=8, batch=8)).state_dict()
    early = [name for name in after if not name.startswith(("layer4", "fc"))]
    assert early
    assert all(torch.equal(after[name], before[name]) for name in early)
    assert not torch.equal(after["layer4.1.conv2.weight"], before["layer4.1.conv2.weight"])
    unseen, wanted = some_pictures(8, seed=500)
    assert fit.logits_of(network, unseen).argmax(1).tolist() == wanted.tolist()


# On a backbone


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of experts with a thin backbone that has learned squares, and of each label's pictures 0 to 9 most."""
    root = tmp_path_factory.mktemp("line")
    folders = [a_folder(root / "pictures"), a_folder(root / "more", {"green": 8, "grey": 8})]
    plan = BackbonePlan(input_size=32, schedule=QUICK, store="int8")
    report = train_backbone(folders, root / "experts", name="line", plan=plan)
    assert (report["classes"], report["pictures"]) == (4, 28), "a fifth of each label is held back"
    return root / "experts"


@pytest.fixture
def out(line: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(line, tmp_path / "experts"))


def test_a_head_on_a_backbone_is_taken_where_nothing_could_beat_it(tmp_path: Path, out: Path):
    folder = a_folder(tmp_path / "parts", {"red": 12, "blue": 12}, first_seed=300)
    report = train(folder, out, "R0402", backbone=True, good="blue", kinds=("head", "last-block", "all-layers"))
    assert [trial.kind for trial in report.trials] == ["head"]
    assert (str(report.chosen.answers.escapes), str(report.chosen.answers.false_calls)) == (
        "0 of 12, 0.0 % (0.0 to 26.5)",
        "0 of 12, 0.0 % (0.0 to 26.5)",
    )
    spec = spec_of(out, "R0402")
    assert spec.backbone is not None
    assert spec.backbone.stored_as == "int8"
    assert report.file.stat().st_size < 30_000 < spec.backbone.weights_bytes
    assert answers(out, [a_square("red", 900), a_square("blue", 901, 50)], "R0402") == ["red", "blue"]
    images = [a_square("blue", 902), a_square("red", 903), np.zeros((32, 32, 3), np.uint8)]
    found = answers_of(spec, [fit_image(image, "classify", 32) for image in images])
    assert [answer.guards for answer in found] == [
        (),
        ("unlike_training",),
        ("picture_quality", "unlike_training"),
    ]


def test_good_pictures_alone_make_a_bank_that_knows_what_is_not_good(tmp_path: Path, out: Path):
    report = train(a_folder(tmp_path / "parts", {"blue": 12}, first_seed=300), out, "R0402", backbone=True, good="blue")
    assert report.chosen.kind == "bank"
    assert report.chosen.answers.escapes.of == 0
    assert spec_of(out, "R0402").classes == ("blue", "defect")
    assert answers(out, [a_square("red", 900), a_square("blue", 901)], "R0402") == ["defect", "blue"]
    assert "how many defects it passes is not known" in report_text(report, [])
    with pytest.raises(TrainingError, match="say with --good that it passes"):
        train(tmp_path / "parts", out, "R0402", backbone=True)


def test_an_expert_is_not_measured_on_pictures_that_its_backbone_has_learned(tmp_path: Path, out: Path):
    folder = a_folder(tmp_path / "parts")
    report = train(folder, out, "R0402", backbone=True, good="blue", kinds=("head",))
    assert len(report.chosen.answers.rows) == 4
    assert "the backbone learned from 16 of these 20 pictures: experts are measured on the others" in report.notes
    _, seen = load_backbone(out / "catalog.yaml", None).network()
    assert len(seen) == 28


def test_a_network_of_another_backbone_is_not_trained_on(tmp_path: Path, out: Path):
    folder = a_folder(tmp_path / "parts", {"red": 4, "blue": 4}, first_seed=300)
    (mine,) = out.glob("line@*.pt")
    other = BackbonePlan(input_size=32, schedule=replace(QUICK, seed=5, epochs=1))
    train_backbone([a_folder(tmp_path / "more")], tmp_path / "other", name="line", plan=other)
    (theirs,) = (tmp_path / "other").glob("line@*.pt")
    shutil.copy(theirs, mine)
    with pytest.raises(TrainingError, match="belongs to another backbone"):
        train(folder, out, "R0402", backbone=True)
    mine.unlink()
    with pytest.raises(TrainingError, match="is missing: experts are trained from it"):
        train(folder, out, "R0402", backbone=True)
    with pytest.raises(TrainingError, match="line is a backbone of"):
        train(folder, out, "line", backbone=True)


def test_symmetry_is_used_where_it_helps(tmp_path: Path, out: Path):
    folder = a_folder(tmp_path / "parts", {"red": 6, "blue": 6}, first_seed=300)
    report = train(folder, out, "R0402", backbone=True, good="blue", symmetry=True, play=2.0, kinds=("head",))
    assert report.symmetry == "none", "squares of one colour are recognised as they are"
    assert any(note.startswith("symmetry none: a head makes 0 mistakes with none") for note in report.notes)
    with pytest.raises(TrainingError, match="--symmetry is tested with a head on a backbone"):
        train(folder, tmp_path / "elsewhere", symmetry=True)


def test_an_expert_that_ranks_no_better_than_chance_is_refused(tmp_path: Path, out: Path):
    folder = a_folder(tmp_path / "parts", {"red": 24, "blue": 24}, first_seed=300)
    for number in range(0, 24, 2):  # half of each is under the other's label
        red, blue = folder / "red" / f"{number}.png", folder / "blue" / f"{number}.png"
        red.rename(folder / "swap.png")
        blue.rename(red)
        (folder / "swap.png").rename(blue)
    before = sorted(out.iterdir())
    with pytest.raises(TrainingError, match="of no use, and nothing was written"):
        train(folder, out, "R0402", backbone=True, good="blue", kinds=("bank", "head"))
    assert sorted(out.iterdir()) == before
    assert train(folder, out, "R0402", backbone=True, good="blue", kinds=("head",), use_anyway=True).file.is_file()


def test_all_types_of_a_line_are_trained_and_a_second_run_goes_on_where_it_was(tmp_path: Path):
    root, out = tmp_path / "training", tmp_path / "experts"
    colours = {"ok": "blue", "bad": "red"}
    a_folder(root / "R0402", {"ok": 6, "bad": 6}, colours=colours)
    a_folder(root / "C0603", {"ok": 6, "bad": 6}, first_seed=50, colours=colours)
    (root / "LED" / "ok").mkdir(parents=True)
    words = ["train", "all", str(root), "--out", str(out), "--input-size", "32", "--epochs", "3", "--threads", "1"]

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tools", *words, "--json"]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    refused = run()
    assert refused.returncode == 1
    assert f"{root / 'LED' / 'ok'}: holds 0 images, two at least are needed" in refused.stderr
    shutil.rmtree(root / "LED")
    first = run()
    assert first.returncode == 0, first.stderr
    rows = json.loads(first.stdout)["experts"]
    assert [(row["expert"], row["is_kept"]) for row in rows] == [("C0603", False), ("R0402", False)]
    assert spec_of(out, "R0402").resident == spec_of(out, "C0603").resident
    (root / "R0402" / "bad" / "0.png").unlink()
    again = json.loads(run().stdout)["experts"]
    assert [(row["expert"], row["is_kept"]) for row in again] == [("C0603", True), ("R0402", False)]
    assert again[0]["figures"] == rows[0]["figures"]


def test_pictures_of_one_board_are_never_on_both_sides():
    files = tuple(
        Path(f"parts/{label}/S{board}.R{n}.png") for board in range(10) for n in range(3) for label in ("a", "b")
    )
    targets = np.array([0 if file.parent.name == "a" else 1 for file in files])
    data = LabelledPictures(("a", "b"), np.zeros((60, 8, 8, 3), np.uint8), targets, files, (), 0, 8.0)
    masks = list(folds(data, 5, np.random.default_rng(0)))
    assert np.stack(masks).sum(0).tolist() == [1] * 60
    for mask in masks:
        boards = {files[row].name.split(".")[0] for row in np.nonzero(mask)[0]}
        assert len(boards) == 2
        assert all(mask[row] for row, file in enumerate(files) if file.name.split(".")[0] in boards)


def test_only_the_kinds_that_tries_names_are_tried(tmp_path: Path):
    words = "train", "classifier", a_folder(tmp_path / "squares"), "--out", tmp_path, "--tries"
    refused = coserve(*words, "head, bank", status=1).stderr
    assert "nothing can be tried: bank: there is no backbone" in refused
    assert "last-block" not in refused
    assert (
        "--tries: expected one of bank, head, last-block, all-layers, not 'all'"
        in coserve(*words, "all", status=2).stderr
    )
