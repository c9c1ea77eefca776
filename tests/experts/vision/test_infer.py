"""Our answers beside the frameworks' own: confidences within 1e-3, boxes within half a pixel."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from experts.errors import ExpertError
from experts.spec import ExpertSpec
from experts.vision.frameworks import ultralytics
from experts.vision.infer import infer, select_detections
from experts.vision.networks import select_head
from experts.vision.preprocess import prepare
from experts.vision.slot import loaded_slot
from tests.experts.pictures import encoded
from tests.experts.samples import PICTURES, a_model, an_expert_file, labels

#: Both heads, and more classes than two; `make test-all` has each family with either number.
USUAL = {("yolo11n", 6), ("yolo26n end to end", 2)}
DETECTORS = [
    each if each in USUAL else pytest.param(*each, marks=pytest.mark.test_all)
    for each in product(("yolov5n", "yolov8n", "yolo11n", "yolo26n", "yolo26n end to end"), (2, 6))
]


def our_answers(spec: ExpertSpec):
    return infer(loaded_slot(spec), [prepare(encoded(picture), "image", None, spec) for picture in PICTURES])


@pytest.mark.parametrize("architecture", ["resnet18", pytest.param("resnet50", marks=pytest.mark.test_all)])
def test_a_classifier_answers_as_torchvision_does(tmp_path: Path, architecture: str):
    import cv2

    size, temperature = 96, 1.7
    spec = an_expert_file(tmp_path, "c", architecture, 5, input_size=size, temperature=temperature)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (spec.mean, spec.std))
    for picture, answer in zip(PICTURES, our_answers(spec), strict=True):
        shrinks = min(picture.shape[:2]) >= size
        square = cv2.resize(picture, (size, size), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        images = (torch.from_numpy(square).permute(2, 0, 1)[None].float() / 255 - mean) / std
        with torch.inference_mode():
            shares = (a_model(architecture)(images) / temperature).softmax(1)[0]
        assert 0.2 < float(shares.max()) < 0.95, "the sample says too little about equality"
        assert answer.label == labels(5)[int(shares.argmax())]
        assert answer.confidence == pytest.approx(float(shares.max()), abs=1e-3)
        assert answer.detections == ()


def framework_detections(model: nn.Module, spec: ExpertSpec, picture: np.ndarray) -> np.ndarray:
    """Rows of x1 y1 x2 y2 confidence class, in stored pixels, by ultralytics alone."""
    ultralytics()
    from ultralytics.data.augment import LetterBox
    from ultralytics.utils.nms import non_max_suppression
    from ultralytics.utils.ops import scale_boxes

    box = LetterBox(spec.input_size, auto=False, scaleup=True, center=True)
    square = np.ascontiguousarray(box(image=picture))
    images = torch.from_numpy(square).permute(2, 0, 1)[None].float() / 255
    with torch.inference_mode():
        output = model(images)[0]
        rows = non_max_suppression(
            output, spec.confidence_floor, spec.nms_iou, max_det=spec.max_detections, end2end=model.end2end
        )[0]
    rows = rows.clone()
    rows[:, :4] = scale_boxes(square.shape[:2], rows[:, :4], picture.shape[:2])
    return rows.numpy()


@pytest.mark.parametrize(("architecture", "class_count"), DETECTORS)
def test_a_detector_answers_as_ultralytics_does(tmp_path: Path, architecture: str, class_count: int):
    architecture, _, end_to_end = architecture.partition(" ")
    model = a_model(architecture, class_count)
    select_head(model, end_to_end=bool(end_to_end))
    spec = an_expert_file(
        tmp_path, "d", architecture, class_count, input_size=160, max_detections=60, end_to_end=bool(end_to_end)
    )
    for picture, answer in zip(PICTURES, our_answers(spec), strict=True):
        expected = framework_detections(model, spec, picture)
        assert len(expected) > 1, "the sample finds too little to compare"
        assert [hit.label for hit in answer.detections] == [labels(class_count)[int(row[5])] for row in expected]
        np.testing.assert_allclose([hit.confidence for hit in answer.detections], expected[:, 4], atol=1e-3)
        np.testing.assert_allclose([hit.box for hit in answer.detections], expected[:, :4], atol=0.5)
        assert (answer.label, answer.confidence) == (answer.detections[0].label, answer.detections[0].confidence)


@pytest.mark.parametrize(("architecture", "parameter"), [("resnet18", -1), ("yolov8n", 0)])
def test_an_expert_that_computes_nonsense_fails_instead_of_answering(tmp_path: Path, architecture: str, parameter: int):
    spec = an_expert_file(tmp_path, "e", architecture, 3)
    slot = loaded_slot(spec)
    list(slot.module.parameters())[parameter].fill_(float("nan"))
    with pytest.raises(ExpertError, match="not finite"):
        infer(slot, [prepare(encoded(PICTURES[0]), "image", None, spec)])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    classes=st.integers(1, 4),
    floor=st.floats(0, 0.99),
    iou=st.floats(0.05, 0.95),
    most=st.integers(1, 30),
)
def test_suppression_is_that_of_ultralytics(seed: int, classes: int, floor: float, iou: float, most: int):
    ultralytics()
    from ultralytics.utils.nms import non_max_suppression

    random = torch.Generator().manual_seed(seed)
    centres, sizes = torch.rand(1, 2, 80, generator=random) * 100, torch.rand(1, 2, 80, generator=random) * 60 + 1
    scores = torch.rand(1, classes, 80, generator=random)
    expected = non_max_suppression(torch.cat((centres, sizes, scores), 1), floor, iou, max_det=most)[0]
    spec = ExpertSpec(
        "e", "yolov8n", "detect", Path(), labels(classes), 64, (0, 0, 0), (1, 1, 1), "", "", 0,
        confidence_floor=floor, nms_iou=iou, max_detections=most,
    )  # fmt: skip
    corners = torch.cat((centres - sizes / 2, centres + sizes / 2, scores), 1)
    (hit,) = select_detections(corners, spec, end_to_end=False)
    np.testing.assert_allclose(hit, expected.numpy(), atol=1e-4)
