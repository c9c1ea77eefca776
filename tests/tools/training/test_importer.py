import json
import os
import re
import subprocess
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from experts.catalog import CatalogFile, read_catalog, resolve
from experts.vision.architectures import NORMALISATIONS
from experts.vision.frameworks import ultralytics
from experts.vision.infer import infer
from experts.vision.networks import select_head
from experts.vision.preprocess import fit
from experts.vision.slot import loaded_slot
from tests.experts.pictures import encoded
from tests.experts.samples import PICTURES, a_model, labels
from tests.small_disk import small_disk
from tests.tools.run_commands import coserve
from tools.experts.measure import answers_of, images_in
from tools.training import TrainingError
from tools.training.expert_file import Form
from tools.training.importer import import_file, import_model

CLASSES = labels(5)


def a_target(folder: Path, architecture: str = "resnet18", input_size: int = 96, **fields) -> dict:
    target = {"architecture": architecture, "input_size": input_size, "out": folder / "experts", "classes": CLASSES}
    return target | ({"normalize": "imagenet"} if architecture.startswith("resnet") else {}) | fields


def a_state_dict(folder: Path, architecture: str = "resnet18", name: str = "trained.pth") -> Path:
    file = folder / name
    torch.save(a_model(architecture).state_dict(), file)
    return file


def a_checkpoint(folder: Path, architecture: str = "yolo11n", *, end_to_end: bool = False) -> Path:
    """What ultralytics' trainer saves: the model itself, pickled, in half precision."""
    ultralytics()
    file, model = folder / "best.pt", a_model(architecture).half()
    model.names = {index: f"defect {index}" for index in range(5)}
    select_head(model, end_to_end=end_to_end)
    torch.save({"model": None, "ema": model, "epoch": -1, "train_args": {}}, file)
    return file


def an_image_folder(folder: Path) -> Path:
    images = folder / "images" / "deep"
    images.mkdir(parents=True)
    for number, picture in enumerate(PICTURES):
        (images / f"{number}.png").write_bytes(encoded(picture))
    (images / "notes.txt").write_text("no image")
    return images.parent


def the_catalog(folder: Path):
    return resolve(CatalogFile(experts=read_catalog(folder / "experts" / "catalog.yaml")), folder / "experts")


def test_a_state_dict_becomes_an_expert_of_the_catalog_that_answers_as_it(tmp_path: Path):
    report = import_file(a_state_dict(tmp_path), **a_target(tmp_path, expert="QFP64"))
    assert 0 < report.agreement.confidence < 1e-3
    assert report.agreement.images == 8
    catalog, problems = the_catalog(tmp_path)
    assert problems == []
    assert (catalog["QFP64"].classes, catalog["QFP64"].mean[0]) == (CLASSES, 0.485)
    assert catalog["QFP64"].pictures is None, "patterns set no limits"
    assert catalog.headers["QFP64"].metadata["origin"] == "imported from trained.pth"
    (answer,) = infer(loaded_slot(catalog["QFP64"]), [fit(PICTURES[0], "classify", 96)])
    assert answer.label in CLASSES
    assert sorted(file.name for file in (tmp_path / "experts").iterdir()) == ["QFP64.safetensors", "catalog.yaml"]


@pytest.mark.parametrize("end_to_end", [pytest.param(False, marks=pytest.mark.test_all), True])
def test_a_pickled_detector_answers_with_the_head_that_its_file_names(tmp_path: Path, end_to_end: bool):
    file = a_checkpoint(tmp_path, "yolo26n", end_to_end=end_to_end)
    target, images = a_target(tmp_path, "yolo26n", 160, classes=()), an_image_folder(tmp_path)
    report = import_file(file, **target, images=images)
    assert report.entry["classes"] == [f"defect {index}" for index in range(5)]
    assert report.agreement.confidence < 1e-3
    assert report.agreement.box_pixels < 0.5
    assert report.spec.layout.endswith("end_to_end") == end_to_end
    catalog, problems = the_catalog(tmp_path)
    assert (list(catalog), problems) == (["best"], [])
    assert catalog["best"].pictures is not None, "limits of the pictures in the folder"


def refusal(file: Path, target: dict) -> str:
    with pytest.raises(TrainingError) as caught:
        import_file(file, **target)
    folder = target["out"]
    assert not folder.exists() or list(folder.iterdir()) == [], "a refused import changed something"
    return str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "changed", "said"),
    [
        ("resnet19", {}, "--architecture: expected one of resnet18, "),
        ("resnet18", {"classes": CLASSES[:3]}, "has 5 outputs, and the classes are label0, label1, label2: name"),
        ("resnet18", {"classes": ()}, "holds no class names; give them in order with --classes"),
        ("resnet18", {"classes": ("ok",) * 5}, "--classes: classes 0 and 1 are both ok, expected different names"),
        ("resnet18", {"expert": "../up"}, "is not an expert id"),
        ("resnet18", {"normalize": None}, "name --normalize"),
        ("resnet18", {"samples": Path("none")}, "none: is no folder of images"),
        ("yolov8n", {"input_size": 100}, "multiple of 32"),
        ("yolov8n", {"normalize": ".5"}, "leave --normalize out"),
    ],
)
def test_every_refusal_says_what_is_wrong_and_what_to_do(tmp_path: Path, architecture: str, changed: dict, said: str):
    file = a_state_dict(tmp_path, "yolov8n" if architecture == "yolov8n" else "resnet18")
    assert said in refusal(file, a_target(tmp_path, architecture) | changed)


def test_a_broken_catalog_is_named_before_anything_is_made(tmp_path: Path):
    (tmp_path / "catalog.yaml").write_text("experts: [")
    words = ("--architecture", "resnet18", "--classes", "a,b,c,d,e", "--normalize", "none", "--out", tmp_path)
    said = coserve("import", a_state_dict(tmp_path), *words, status=1).stderr
    assert said.startswith("importing trained\n"), "an import may take a minute"
    assert "catalog.yaml:2:1: not YAML" in said
    assert not (tmp_path / "trained.safetensors").exists()


def test_names_in_a_checkpoint_are_taken_or_contradict_those_that_a_person_gives(tmp_path: Path):
    file, bad = tmp_path / "named.pth", tmp_path / "bad.pth"
    order = {label: 4 - number for number, label in enumerate(CLASSES)}
    torch.save({"state_dict": a_model().state_dict(), "args": Namespace(class_to_idx=order)}, file)
    contradiction = refusal(file, a_target(tmp_path))
    assert f"its class_to_idx says {', '.join(CLASSES[::-1])}, --classes says {', '.join(CLASSES)}" in contradiction
    torch.save({"state_dict": a_model().state_dict(), "names": {0: False, **dict(enumerate("abcd", 1))}}, bad)
    assert "its names: class 0 is False, not text" in refusal(bad, a_target(tmp_path, classes=()))
    for beside in ({"classes": np.array(CLASSES)}, {"class_to_idx": {c: np.int64(n) for n, c in enumerate(CLASSES)}}):
        torch.save({"state_dict": a_model().state_dict(), **beside}, bad)
        for classes in (CLASSES, ()):
            said = refusal(bad, a_target(tmp_path, classes=classes))
            assert "give them in order with --classes, and --images in a folder for each class" in said
    save_file(a_model().state_dict(), bad, {"format": "pt", "id2label": json.dumps(dict(enumerate(CLASSES[::-1])))})
    assert f"its id2label says {', '.join(CLASSES[::-1])}, --classes says" in refusal(bad, a_target(tmp_path))
    for beside in (
        {"config": {"id2label": dict(enumerate(CLASSES[::-1]))}},
        {"meta": {"CLASSES": CLASSES[::-1]}},
        {"labels": list(CLASSES[::-1])},
        {"hyper_parameters": {"cfg": {"data": {"class_to_idx": order}}}},
    ):
        torch.save({"state_dict": a_model().state_dict(), "num_classes": 5, "classes": 5} | beside, bad)
        assert f"says {', '.join(CLASSES[::-1])}, --classes says" in refusal(bad, a_target(tmp_path)), beside
    report = import_file(file, **a_target(tmp_path, input_size=32, classes=()))
    assert report.spec.classes == CLASSES[::-1]
    assert report.notes == (f"classes {', '.join(CLASSES[::-1])}, from class_to_idx of named.pth",)


def test_a_classifier_of_one_label_which_would_always_be_sure_is_refused(tmp_path: Path):
    torch.save(a_model(class_count=1).state_dict(), tmp_path / "one.pth")
    target = a_target(tmp_path, classes=("ok",))
    assert "has 1 output, and the classes are ok: train it with an output for" in refusal(tmp_path / "one.pth", target)


def labelled_images(folder: Path, normalisation: str, channels: int = 3) -> tuple[Path, Path]:
    """Write a network with two outputs and 24 pictures, each in the folder of the class that it answers.

    It answers so only if pictures are normalised as `normalisation`; a bias parts them in two halves.
    """
    model = a_model(class_count=2)
    if channels == 1:
        model.conv1 = torch.nn.Conv2d(1, 64, 7, 2, 3, bias=False)
    random = np.random.default_rng(5)
    pictures = [random.integers(0, random.integers(30, 256), (32, 32, channels), dtype=np.uint8) for _ in range(24)]
    pictures = [picture.repeat(3 // channels, 2) for picture in pictures]
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in NORMALISATIONS[normalisation])
    inputs = (torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255 - mean) / std
    with torch.inference_mode():
        logits = model(inputs[:, :channels])
    middle = (logits[:, 1] - logits[:, 0]).sort().values[11:13].mean()
    model.fc.bias.data[1] -= middle
    model.fc.weight.data *= 1000  # sure of each
    model.fc.bias.data *= 1000
    images = folder / f"photos {normalisation}"
    for number, (picture, answer) in enumerate(zip(pictures, logits[:, 1] - logits[:, 0] > middle, strict=True)):
        place = images / "ab"[answer] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encoded(picture))
    torch.save(model.state_dict(), folder / "net.pth")
    return folder / "net.pth", images


@pytest.mark.promise(
    "Versions of experts",
    "An imported classifier is measured on labelled images: another normalisation or order of classes is refused",
)
@pytest.mark.parametrize(
    "fits", [*(pytest.param(each, marks=pytest.mark.test_all) for each in ("imagenet", "none")), ".5"]
)
def test_the_normalisation_that_fits_labelled_images_is_taken_and_another_is_refused(tmp_path: Path, fits: str):
    file, images = labelled_images(tmp_path, fits)
    target = a_target(tmp_path, input_size=32, classes=("a", "b"), expert="e", images=images, form=Form(tolerance=0.5))
    target |= {"samples": images}
    for normalize in {"imagenet", "none", ".5"} - {fits}:
        assert f"; on 24 with --normalize {fits}" in refusal(file, target | {"normalize": normalize})
    swapped = refusal(file, target | {"normalize": None, "classes": ("b", "a")})
    assert re.search(r"right on \d+ of 24 .*; on 24 with .*--classes a,b$", swapped)
    few = tmp_path / "few"
    for label in "ab":
        for picture in sorted((images / label).iterdir())[:3]:
            (few / label).mkdir(parents=True, exist_ok=True)
            (few / label / picture.name).write_bytes(picture.read_bytes())
    swapped = refusal(file, target | {"normalize": None, "classes": ("b", "a"), "images": few, "samples": None})
    assert re.search(r"right on \d of 6 .*; on 6 with .*--classes a,b$", swapped)
    for normalize in (fits, None):
        report = import_file(file, **target | {"normalize": normalize})
        assert f"normalisation {fits}: right on 24 of 24 labelled images" in report.notes[0]
    spec = the_catalog(tmp_path)[0]["e"]
    assert (spec.mean, spec.std) == NORMALISATIONS[fits]
    for label in "ab":
        assert {answer.label for answer in answers_of(spec, images_in(images / label, spec))} == {label}
    entry = read_catalog(tmp_path / "experts" / "catalog.yaml")["e"]
    assert {label: sum(counts) for label, counts in (entry.confidences or {}).items()} == {"a": 12, "b": 12}


def test_images_that_are_no_labels_are_said_and_do_not_choose_a_normalisation(tmp_path: Path):
    file, images = labelled_images(tmp_path, "none")
    target = a_target(tmp_path, input_size=32, classes=("x", "y"), images=images, form=Form(tolerance=0.5))
    assert "a folder of pictures for each class (x,y)" in refusal(file, target | {"normalize": None})
    (images / "b").rename(images / "c")
    named = target | {"classes": ("a", "b")}
    assert "name --normalize" in refusal(file, named | {"normalize": None})
    assert "has no pictures of b" in import_file(file, **named | {"normalize": "none"}).notes[1]
    assert "not measured: no folder of" in import_file(file, **target).notes[0]


def test_a_network_of_one_channel_answers_to_grey_pictures_as_before(tmp_path: Path):
    file, images = labelled_images(tmp_path, ".5", channels=1)
    target = a_target(tmp_path, input_size=32, classes=("a", "b"), expert="e", images=images, form=Form(tolerance=0.5))
    channel, measured = import_file(file, **target | {"normalize": None}).notes
    assert "takes one channel" in channel
    assert "normalisation .5: right on 24 of 24" in measured
    assert "; on 24 with --normalize .5" in refusal(file, target | {"normalize": "none", "out": tmp_path / "other"})


def test_an_expert_that_disagrees_is_refused_and_the_old_one_stays(tmp_path: Path):
    file, target = a_state_dict(tmp_path), a_target(tmp_path, expert="r18")
    before = import_file(file, **target)
    strict = target | {"form": Form(dtype="bfloat16", tolerance=1e-9)}
    with pytest.raises(TrainingError, match="import it as float32"):
        import_file(file, **strict)
    catalog, problems = the_catalog(tmp_path)
    assert (catalog["r18"].sha256, problems) == (before.entry["sha256"], [])


@pytest.mark.parametrize(
    ("tensor", "dtype"), [("fc.bias", "float32"), ("conv1.weight", "float32"), ("fc.bias", "auto")]
)
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, tensor: str, dtype: str):
    model = a_model()
    model.get_parameter(tensor).data.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"e: .* holds weights that are not finite numbers; train it again"):
        import_model(model, "resnet18", CLASSES, 64, tmp_path, expert="e", form=Form(dtype=dtype))
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_cannot_hold_the_weights_is_refused_and_auto_passes_over_it(tmp_path: Path):
    model = a_model()
    model.fc.weight.data[2, 7] = 1e30
    reason = r"fc\.weight holds weights beyond 65504, the largest float16; import it as float32"
    with pytest.raises(TrainingError, match=reason):
        import_model(model, "resnet18", CLASSES, 64, tmp_path, expert="e", form=Form(dtype="float16"))
    assert list(tmp_path.iterdir()) == []
    report = import_model(model, "resnet18", CLASSES, 64, tmp_path, expert="e", form=Form(dtype="auto"))
    assert [trial.dtype for trial in report.trials] == ["float32", "bfloat16"]
    assert [re.search(reason, text) is not None for text in report.unfit] == [True]
    assert [file.name for file in tmp_path.iterdir()] == ["e.safetensors"]


@pytest.mark.parametrize(
    ("architecture", "input_size"), [pytest.param("resnet18", 96, marks=pytest.mark.test_all), ("yolo11n", 160)]
)
def test_a_thin_file_is_written_proved_and_kept_with_its_figures(tmp_path: Path, architecture: str, input_size: int):
    file = a_state_dict(tmp_path, architecture)
    form = Form(store="int8", tolerance=float("inf"))
    report = import_file(file, **a_target(tmp_path, architecture, input_size, expert="a", form=form))
    catalog, problems = the_catalog(tmp_path)
    assert problems == []
    assert (catalog["a"].stored_as, catalog["a"].stored_bytes) == ("int8", report.spec.stored_bytes)
    assert catalog["a"].weights_bytes > 3.5 * catalog["a"].read_bytes
    assert (tmp_path / "experts" / "a.safetensors").stat().st_size < catalog["a"].weights_bytes / 3.5
    entries = tmp_path / "experts" / "catalog.yaml"
    figures = yaml.safe_load(entries.read_text(encoding="utf-8"))["experts"]["a"]["stored"]
    assert (figures["form"], figures["bytes"], figures["on"]) == ("int8", catalog["a"].read_bytes, "patterns")
    assert figures["confidence"] == pytest.approx(report.agreement.confidence)
    assert ("mean_precision" in figures) == (architecture == "yolo11n")
    import_file(file, **a_target(tmp_path, architecture, input_size, expert="a"))
    plain, _ = the_catalog(tmp_path)
    assert plain["a"].stored_as == ""
    assert not yaml.safe_load(entries.read_text(encoding="utf-8"))["experts"]["a"].get("stored")


def test_auto_keeps_the_thinnest_form_that_agrees_and_shows_what_it_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file, images = a_state_dict(tmp_path), an_image_folder(tmp_path)
    target = a_target(tmp_path, expert="a", form=Form(store="auto"))
    for near, expected in ((1.0, ["int8"]), (0.0, ["int8", "bfloat16"])):
        monkeypatch.setattr("tools.training.expert_file._NEAR_CONFIDENCE", near)
        monkeypatch.setattr("tools.training.expert_file._SAME_LABELS", 0.0)
        report = import_file(file, **target, images=images)
        assert [trial.stored_as for trial in report.thin] == expected
        assert [trial.agrees for trial in report.thin] == [near == 1.0] * len(expected)
        assert report.spec.stored_as == ("int8" if near else "")
        assert ("stored" in report.entry) == bool(near)
        assert report.agreement.images == len(PICTURES)
    assert sorted(made.name for made in (tmp_path / "experts").iterdir()) == ["a.safetensors", "catalog.yaml"]


def test_an_import_removes_what_a_killed_one_left(tmp_path: Path):
    out = tmp_path / "experts"
    (killed,) = (process for process in [subprocess.Popen(["true"])] if process.wait() == 0)
    left, working = (out / f".new-{pid}-a_b" for pid in (killed.pid, os.getppid()))
    for folder in (left, working):
        folder.mkdir(parents=True)
        (folder / "float32.int8").write_bytes(b"weights")
    import_file(a_state_dict(tmp_path), **a_target(tmp_path, expert="r"))
    assert [file for file in out.iterdir() if file.name.startswith(".")] == [working]


def test_a_full_disk_is_named_and_leaves_nothing_of_the_import(tmp_path: Path):
    file = a_state_dict(tmp_path)
    with small_disk(tmp_path / "small", "50m") as disk:
        target = a_target(tmp_path, expert="a", form=Form(store="int8"), out=disk)
        reason = f"cannot write to {disk}: No space left on device; correct that, or name another folder with --out"
        free_pages = os.statvfs(disk).f_bavail
        thin_pages = 2740
        for left_pages in (thin_pages - 1, thin_pages):  # not the file; the file, and not its entry in the catalog
            (disk / "fill").write_bytes(bytes(4096 * (free_pages - left_pages)))
            with pytest.raises(TrainingError, match=re.escape(reason)):
                import_file(file, **target)
            assert [entry.name for entry in disk.iterdir()] == ["fill"]
