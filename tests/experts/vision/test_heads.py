"""Heads on a shared backbone: one batch for many component types, each answer from its own small file."""

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from experts.catalog import Catalog, CatalogEntry, CatalogFile, add_expert, read_catalog, resolve
from experts.errors import ExpertError
from experts.spec import Answer, ExpertId
from experts.vision import heads
from experts.vision.infer import infer, infer_each
from experts.vision.networks import Backbone
from experts.vision.preprocess import fit
from experts.vision.slot import loaded_slot
from experts.weights import Block, read_header, write_weights
from tests.experts.samples import PICTURES, a_model, an_expert_file
from tools.training.backbone import load_backbone, stored_backbone, write_backbone
from tools.training.fit import logits_of
from tools.training.head import fit_bank, fit_usual, write_head

SIZE = 96
IMAGES = [fit(picture, "classify", SIZE) for picture in PICTURES]
LABELS = ("ok", "missing", "shifted", "rotated", "reversed")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog with the backbone `line`, and three heads: the network's own last layer, another one, a bank."""
    folder, model = tmp_path_factory.mktemp("experts"), a_model("resnet18")
    entry = write_backbone(model, "resnet18", SIZE, folder, "line")
    add_expert(folder / "catalog.yaml", "line", entry)
    backbone = CatalogEntry.model_validate(entry)
    torch.manual_seed(1)
    good = np.stack([image.pixels for image in IMAGES[:2]])
    features = logits_of(Backbone(a_model("resnet18")), good)
    last = a_model("resnet18").fc
    heads = {
        "R0402": ("linear", LABELS, {"weight": last.weight, "bias": last.bias}),
        "QFP32": ("linear", ("bad", "ok"), {"weight": torch.randn(2, 512), "bias": torch.zeros(2)}),
        "CE6": ("bank", ("ok", "defect"), {**fit_bank(features, 256), "odds": torch.tensor([1.0, 0.5, 1.0])}),
    }
    for expert, (kind, classes, tensors) in heads.items():
        head = write_head(kind, tensors, backbone, classes, folder, expert=expert, origin="test")
        add_expert(folder / "catalog.yaml", expert, head)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "experts"))


def read(folder: Path) -> tuple[Catalog, list[str]]:
    document = yaml.safe_load((folder / "catalog.yaml").read_text(encoding="utf-8"))
    catalog, problems = resolve(CatalogFile.model_validate(document), folder)
    return catalog, [f"{'.'.join(map(str, place))}: {message}" for place, message in problems]


@pytest.mark.parametrize("form", ["int8", "bfloat16"])
def test_heads_learn_from_the_weights_of_a_thin_backbone_as_they_are_stored(tmp_path: Path, form: str):
    model = a_model("resnet18")
    entry = write_backbone(model, "resnet18", SIZE, tmp_path, "line", store=form)
    add_expert(tmp_path / "catalog.yaml", "line", entry)
    slot = stored_backbone(tmp_path, "line", entry)
    assert slot.spec.stored_as == form
    known = load_backbone(tmp_path / "catalog.yaml", None)
    assert known is not None
    pictures = np.stack([image.pixels for image in IMAGES])
    networks = (slot.module, Backbone(known.network()[0]), Backbone(model))
    served, learned, trained = (logits_of(network, pictures) for network in networks)
    assert torch.allclose(learned, served, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(trained, served, rtol=1e-4, atol=1e-4)


def test_a_head_answers_as_the_whole_network_does(folder: Path):
    catalog, problems = read(folder)
    assert problems == []
    head = catalog[ExpertId("R0402")]
    whole = an_expert_file(folder / "whole", "whole", "resnet18", 5, input_size=SIZE)
    answers = infer(loaded_slot(head), IMAGES, head), infer(loaded_slot(whole), IMAGES)
    for of_head, of_whole in zip(*answers, strict=True):
        assert LABELS.index(of_head.label) == whole.classes.index(of_whole.label)
        assert of_head.confidence == pytest.approx(of_whole.confidence, abs=1e-4)
    assert head.weights_bytes < 20_000 < head.resident.weights_bytes


def test_one_batch_holds_images_of_many_component_types(folder: Path):
    catalog, _ = read(folder)
    heads = [catalog[ExpertId(name)] for name in ("R0402", "QFP32", "CE6")]
    assert len({spec.resident.expert for spec in heads}) == 1
    slot = loaded_slot(heads[0])
    experts = [heads[number % 3] for number in range(len(IMAGES))]
    for image, expert, answer in zip(IMAGES, experts, infer_each(slot, IMAGES, experts), strict=True):
        (alone,) = infer(slot, [image], expert)
        assert isinstance(answer, Answer)
        assert answer.label == alone.label
        assert answer.confidence == pytest.approx(alone.confidence, abs=1e-4)


def test_a_bank_passes_the_pictures_that_it_holds_and_no_other_kind(folder: Path):
    catalog, _ = read(folder)
    bank = catalog[ExpertId("CE6")]
    noise = np.random.default_rng(0).integers(0, 255, (SIZE, SIZE, 3), np.uint8)
    held, other = infer(loaded_slot(bank), [IMAGES[0], fit(noise, "classify", SIZE)], bank)
    assert (held.label, other.label) == ("ok", "defect")


@pytest.mark.promise("Containment", "A picture unlike the good ones that a head learned from never passes")
def test_an_answer_about_a_picture_unlike_the_good_ones_carries_the_guard(folder: Path):
    model, good = a_model("resnet18"), np.stack([image.pixels for image in IMAGES[:2]])
    features = logits_of(Backbone(a_model("resnet18")), np.concatenate([good, good[:, ::-1], good[:, :, ::-1]]))
    backbone = read_catalog(folder / "catalog.yaml")["line"]
    head = {"weight": model.fc.weight, "bias": model.fc.bias, "usual": fit_usual(features, 256)}
    entry = write_head("linear", head, backbone, LABELS, folder, expert="R0402", origin="test")
    limits = {"brightness": [0, 255], "sharpness": [0, 255], "constant": 1.0, "distance": 1.5}
    for expert in ("R0402", "QFP32"):
        own = entry if expert == "R0402" else dict(read_catalog(folder / "catalog.yaml")[expert])
        add_expert(folder / "catalog.yaml", expert, own | {"pictures": limits})
    catalog, problems = read(folder)
    assert problems == []
    noise = fit(np.random.default_rng(0).integers(0, 255, (SIZE, SIZE, 3), np.uint8), "classify", SIZE)
    limited, older, bank = (catalog[ExpertId(name)] for name in ("R0402", "QFP32", "CE6"))
    answers = infer_each(loaded_slot(limited), [*IMAGES[:2], noise, noise], [limited, limited, limited, bank])
    assert [answer.guards for answer in answers if isinstance(answer, Answer)] == [(), (), ("unlike_training",), ()]
    (refused,) = infer_each(loaded_slot(limited), IMAGES[:1], [older])
    assert "QFP32.safetensors: lacks the features that `pictures` compares with" in str(refused)


def test_a_damaged_head_costs_its_own_images_only(folder: Path):
    (folder / "QFP32.safetensors").write_bytes((folder / "R0402.safetensors").read_bytes())
    catalog, problems = read(folder)
    assert [problem.split(":")[0] for problem in problems] == ["experts.QFP32.classes"]
    good, spec = catalog[ExpertId("R0402")], catalog[ExpertId("CE6")]
    file = folder / "CE6.safetensors"
    content = bytearray(file.read_bytes())
    content[-5000] ^= 1
    file.write_bytes(content)
    fine, lost = infer_each(loaded_slot(good), IMAGES[:2], [good, spec])
    assert isinstance(fine, Answer)
    assert isinstance(lost, ExpertError)
    assert "CE6.safetensors: its contents changed" in str(lost)
    with pytest.raises(ExpertError, match="CE6"):
        infer(loaded_slot(good), IMAGES[:1], spec)


def test_a_disk_that_does_not_answer_holds_up_one_batch_and_no_head_that_was_read_before(
    written: Path, monkeypatch: pytest.MonkeyPatch
):
    catalog, _ = read(written)
    spec, other, known = (catalog[ExpertId(name)] for name in ("R0402", "QFP32", "CE6"))
    begun, answers, backbone = threading.Event(), threading.Event(), spec.backbone
    assert backbone is not None
    all_heads, read_head = heads.Heads(), heads.read_head
    all_heads.get(known, backbone)
    monkeypatch.setattr(heads, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(heads, "read_head", lambda spec: begun.set() or (answers.wait(30.0) and read_head(spec)))
    thread = threading.Thread(target=all_heads.get, args=(spec, backbone))
    thread.start()
    assert begun.wait(30.0)
    for each in (spec, other):
        with pytest.raises(ExpertError, match=f"expert {each.name}: .*the disk does not answer"):
            all_heads.get(each, backbone)
    all_heads.get(known, backbone)
    answers.set()
    thread.join()
    for each in (spec, other):
        all_heads.get(each, backbone)


def test_a_backbone_that_changed_under_its_heads_is_refused_by_digest(folder: Path):
    other = write_backbone(a_model("resnet18", seed=9), "resnet18", SIZE, folder, "line")
    document = yaml.safe_load((folder / "catalog.yaml").read_text(encoding="utf-8"))
    before = document["experts"]["R0402"]["backbone"]
    document["experts"]["R0402"]["backbone"] = {"file": other["file"], "sha256": other["sha256"]}
    (folder / "catalog.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    catalog, problems = read(folder)
    assert "R0402" not in catalog
    trained_on, named = before["sha256"][:12], other["sha256"][:12]
    expected = (
        f"R0402.safetensors was trained on backbone {trained_on}…, not {named}…; name that one, or train the head"
    )
    assert problems == [f"experts.R0402.backbone: {expected} again"]
    # The file itself was replaced: nothing loads.
    (folder / before["file"]).write_bytes((folder / other["file"]).read_bytes())
    with pytest.raises(ExpertError, match="its contents changed"):
        loaded_slot(catalog[ExpertId("QFP32")])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"backbone": None}, "is a head: name the file and sha256 of backbone"),
        ({"backbone": {"file": "nowhere.safetensors", "sha256": "0" * 64}}, "no such weights file"),
        ({"backbone": {"file": "R0402.safetensors", "sha256": "0" * 64}}, "was trained on backbone"),
    ],
)
def test_catalogs_that_contradict_a_head_are_refused_by_name(folder: Path, change: dict, expected: str):
    document = yaml.safe_load((folder / "catalog.yaml").read_text(encoding="utf-8"))
    entry = document["experts"]["R0402"] | change
    document["experts"]["R0402"] = {key: value for key, value in entry.items() if value is not None}
    (folder / "catalog.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    _, problems = read(folder)
    assert len(problems) == 1
    assert expected in problems[0]


def test_a_head_of_another_kind_of_numbers_or_an_impossible_calibration_is_refused(folder: Path):
    backbone = CatalogEntry.model_validate(yaml.safe_load((folder / "catalog.yaml").read_text())["experts"]["line"])
    metadata = dict(read_header(folder / "CE6.safetensors").metadata)
    bank = torch.zeros(36, 2, 256), torch.ones(256), torch.tensor([1.0, -1.0, 1.0])
    wrong = dict(zip(("bank", "scale", "odds"), bank, strict=True))
    entry = write_head("bank", wrong, backbone, ("ok", "defect"), folder, expert="CE6", origin="test")
    add_expert(folder / "catalog.yaml", "CE6", entry)
    spec = read(folder)[0][ExpertId("CE6")]
    with pytest.raises(ExpertError, match="impossible calibration"):
        infer(loaded_slot(spec), IMAGES[:1], spec)
    sha256 = write_weights(folder / "CE6.safetensors", [Block("bank", "F16", (1,), b"ab")], metadata)
    add_expert(folder / "catalog.yaml", "CE6", entry | {"sha256": sha256})
    (problem,) = read(folder)[1]
    assert "holds its weights as F16, expected F32; import it again" in problem
