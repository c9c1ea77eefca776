"""Training detectors: the loop on toys, a YOLO data set from its files to an expert, and what is said of bad files."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from daemon.line.line import load_catalog
from experts.spec import ExpertId
from experts.vision.preprocess import decode, to_square
from tests.tools.training.yolo import a_data_set
from tools.training import TrainingError
from tools.training.detector import PhotographSampler, Views, train_detector
from tools.training.detector_loop import Progress, Sample, TrainingEffort, fit_detector
from tools.training.labelled import Photograph, read_yolo_data

pytestmark = pytest.mark.test_all

SIZE = 64


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def a_bright_square(rng: np.random.Generator) -> Sample:
    image = rng.integers(0, 60, (SIZE, SIZE), dtype=np.uint8)
    side = int(rng.integers(14, 28))
    x, y = (int(at) for at in rng.integers(0, SIZE - side, 2))
    image[y : y + side, x : x + side] = 220
    return image, np.array([[x, y, x + side, y + side, 0]], np.float32)


def fit(steps: int, *, batch: int = 4) -> tuple[torch.nn.Module, list[Progress]]:
    seen: list[Progress] = []
    effort = TrainingEffort(steps=steps, batch=batch, threads=1)
    model, _ = fit_detector(a_bright_square, ["square"], "yolo11n", SIZE, effort, on_progress=seen.append)
    return model, seen


def test_the_loss_falls_and_the_model_is_ready_to_import() -> None:
    model, seen = fit(60, batch=8)
    assert seen[-1].step == 60
    assert seen[-1].share == 1.0
    assert seen[-1].loss < 0.85 * max(progress.loss for progress in seen)
    assert not model.training
    assert model.names == {0: "square"}


def test_wrong_wishes_are_refused_before_any_work() -> None:
    with pytest.raises(TrainingError, match="either minutes or steps"):
        TrainingEffort()
    with pytest.raises(TrainingError, match="--architecture: expected one of yolov5n, "):
        fit_detector(a_bright_square, ["square"], "resnet18", SIZE, TrainingEffort(steps=1))
    with pytest.raises(TrainingError, match="not a multiple of 32"):
        fit_detector(a_bright_square, ["square"], "yolo11n", 70, TrainingEffort(steps=1))


def test_the_closing_sampler_gives_what_the_line_sees(tmp_path: Path) -> None:
    data = read_yolo_data(a_data_set(tmp_path))
    pixels, boxes = PhotographSampler(data.train, SIZE, jitter=False)(np.random.default_rng(0))
    picture = decode(data.train[0].file.read_bytes(), "image")
    assert np.array_equal(pixels, to_square(picture, "detect", SIZE))
    assert boxes.tolist() == [[24.0, 24.0, 40.0, 40.0, 0.0]]


def test_boxes_stay_on_what_they_mark_when_photographs_are_moved(tmp_path: Path) -> None:
    data = read_yolo_data(a_data_set(tmp_path))
    sampler, rng = PhotographSampler(data.train, SIZE, jitter=True), np.random.default_rng(1)
    for _ in range(20):
        pixels, boxes = sampler(rng)
        bright = np.argwhere(pixels.min(axis=2) > 140)
        found = [*bright.min(axis=0)[::-1], *(bright.max(axis=0)[::-1] + 1)]
        assert np.abs(boxes[0, :4] - np.array(found)).max() <= 1.5


def test_symmetry_shows_all_eight_views_and_boxes_turn_with_them(tmp_path: Path) -> None:
    photograph = Photograph(tmp_path / "corner.png", np.array([[0.125, 0.25, 0.25, 0.75, 0]], np.float32))
    picture = np.zeros((64, 64, 3), np.uint8)
    picture[16:48, 8:16] = 255
    picture[0, 0] = 100
    sampler = PhotographSampler([photograph], SIZE, jitter=False, views=Views(symmetry=True))
    sampler.cache[photograph.file] = picture
    views, rng = set[bytes](), np.random.default_rng(0)
    for _ in range(100):
        pixels, boxes = sampler(rng)
        views.add(pixels.tobytes())
        bright = np.argwhere(pixels.min(axis=2) > 200)
        assert boxes[0, :4].tolist() == [*bright.min(axis=0)[::-1], *(bright.max(axis=0)[::-1] + 1)]
    assert len(views) == 8


def test_a_picture_of_val_that_cannot_be_read_is_named_before_minutes_of_training(tmp_path: Path) -> None:
    file = a_data_set(tmp_path)
    (tmp_path / "images/val/val1.png").write_bytes(b"\x89PNG")
    with pytest.raises(TrainingError, match=r"val1.png: .*; take it out of the folder"):
        train_detector(file, "none", SIZE, tmp_path, expert="solder", effort=TrainingEffort(steps=1))


def test_a_data_set_becomes_an_expert_with_a_report(tmp_path: Path) -> None:
    file, out = a_data_set(tmp_path), tmp_path / "experts"
    png = tmp_path / "images/val/val0.png"
    cv2.imwrite(str(png.with_suffix(".webp")), cv2.imread(str(png)))
    png.unlink()
    effort, views = TrainingEffort(steps=2, batch=2, threads=1, closing_share=0.6), Views(crop=32)
    report = train_detector(file, "yolo11n", SIZE, out, expert="solder", effort=effort, views=views, store="int8")
    catalog, problems, unusable = load_catalog(out / "catalog.yaml")
    assert not problems
    assert not unusable
    assert catalog is not None
    assert catalog[ExpertId("solder")].classes == ("bridge", "void")
    assert catalog[ExpertId("solder")].stored_as == "int8"
    assert (report.steps, report.held_out_images) == (2, 2)
    assert 0.0 <= report.map50 <= 1.0
    assert sorted(path.name for path in out.iterdir()) == ["catalog.yaml", "solder.safetensors"]
