"""The recipe of the demo's experts: a thousandth of it, from pictures to figures, and what it rests on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from daemon.line.line import load_catalog
from experts.weights import file_sha256
from routing_rules.compile import ExpertLabels, compile_rules
from routing_rules.load import read_yaml
from tools.camera.render import board_types, part_types
from tools.camera.render.images import DEFECT_RATE
from tools.demo.export import Observed, choose_thresholds
from tools.demo.line import SHIPPED, SOLDER_DETECTORS, Thresholds, read_thresholds, write_rules
from tools.demo.pictures import render_missing
from tools.demo.recipe import Recipe, train
from tools.demo.training import DETECTORS, Lesson, SolderLoss, network_loss, train_on


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    assert list(render_missing(folder / "pictures", 1)) == [0]
    return folder


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda d: d.expert)
def test_pictures_for_a_detector_carry_boxes_of_its_labels_inside_them(pictures: Path, detector):
    loss, rng, counts = network_loss(detector.expert, pictures, 1), np.random.default_rng(0), []
    assert isinstance(loss, SolderLoss)
    loss.read(0)
    for _ in range(40):
        pixels, boxes = loss.picture(detector.size, rng)
        counts.append(len(boxes))
        assert pixels.shape == (detector.size, detector.size, 3)
        assert (boxes[:, :4] >= 0).all()
        assert (boxes[:, :4] <= detector.size).all()
        assert (boxes[:, 2:4] > boxes[:, :2]).all()
        assert set(boxes[:, 4].astype(int)) <= set(range(len(detector.labels)))
    assert min(counts) == 0, "good parts are among the pictures"
    assert max(counts) > 0


class _StoppedError(Exception):
    pass


def test_a_training_that_was_stopped_gives_what_an_uninterrupted_one_gives(pictures: Path, tmp_path: Path):
    lesson = Lesson("solder-chip", size=64, first_size=64, first_steps=0, steps=3, batch=2)

    def stop(share: float) -> None:
        if 0.5 < share < 1:
            raise _StoppedError

    def weights(name: str) -> list[torch.Tensor]:
        return list(torch.load(tmp_path / name, weights_only=True)["average"].values())

    def loss() -> SolderLoss:
        loss = network_loss("solder-chip", pictures, 1, lesson)
        assert isinstance(loss, SolderLoss)
        return loss

    train_on(loss(), lesson, tmp_path / "whole")
    with pytest.raises(_StoppedError):
        train_on(loss(), lesson, tmp_path / "parts", stop, every_s=0)
    train_on(loss(), lesson, tmp_path / "parts")
    assert all(torch.equal(one, other) for one, other in zip(weights("whole"), weights("parts"), strict=True))


def test_thresholds_are_those_of_each_component_and_of_each_familys_solder():
    sure = [Observed("R0402", "ok", "ok", 0.97, {}), Observed("R0402", "shifted", "ok", 0.6, {})]
    solder = [
        Observed("QFP32", "ok", "ok", 1.0, {"bridge": 0.2}),
        Observed("QFP44", "bridge", "ok", 1.0, {"bridge": 0.8}),
    ]
    chosen = choose_thresholds([*sure, *solder])
    assert set(chosen.review_below) == set(part_types())
    assert 0.7 < chosen.review_below["R0402"] < 0.9
    assert 0.4 < chosen.fail_on["qfp"]["bridge"] < 0.6
    assert "lifted_lead" not in chosen.fail_on["chip"]


def test_the_rules_fit_the_experts_and_boards_and_name_the_thresholds(tmp_path: Path):
    limits = {family: {"insufficient": 0.41} for family in SOLDER_DETECTORS}
    path = write_rules(tmp_path, Thresholds(dict.fromkeys(part_types(), 0.83), limits))
    experts = {name: ExpertLabels("classify", part.labels) for name, part in part_types().items()}
    experts |= {d.expert: ExpertLabels("detect", d.labels) for d in DETECTORS}
    routes = compile_rules(read_yaml(path), str(path), experts)
    assert set(routes.recipes) == set(board_types())
    for name, part in part_types().items():
        (detector,) = (d.expert for d in DETECTORS if d.covers(part))
        assert [expert for expert, _ in routes.successors[name]] == [detector] == [SOLDER_DETECTORS[part.family]]
    document = yaml.safe_load(path.read_text("utf-8"))
    assert document["classifiers"]["CE6"]["review_below"] == 0.83
    assert document["detectors"]["solder-qfp"]["fail_on"] == {"insufficient": 0.41}
    shipped = write_rules(tmp_path, read_thresholds(SHIPPED))
    assert compile_rules(read_yaml(shipped), str(shipped), experts).warnings == ()


@pytest.mark.test_all
@pytest.mark.timeout(600)
def test_a_thousandth_of_the_recipe_makes_experts_that_judge_boards(tmp_path: Path):
    small = Recipe(files=1, held_out_files=1, steps_share=0.0005, calibration_boards=4, measured_boards=4)
    out = train(tmp_path, small)
    catalog, *_ = load_catalog(out / "catalog.yaml")
    assert catalog is not None
    assert len(catalog) == 19
    assert {spec.resident.stored_as for spec in catalog.values()} == {"int8"}
    assert set(read_thresholds(out).review_below) == set(part_types())
    provenance = json.loads((out / "provenance.json").read_text("utf-8"))
    assert all(file_sha256(out / name) == file["sha256"] for name, file in provenance["files"].items())
    assert sum(file["bytes"] for file in provenance["files"].values()) < 20e6
    assert [figures["rate"] for figures in provenance["figures"]] == [DEFECT_RATE, 0.2]
