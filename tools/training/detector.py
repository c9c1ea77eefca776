"""Trains a detector on a YOLO data set, and measures the expert on the images of the set's `val`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from experts.catalog import add_expert
from experts.drift import histograms
from experts.spec import ExpertSpec
from experts.vision.architectures import YOLO_STRIDE_PIXELS
from experts.vision.guards import learn_limits
from experts.vision.preprocess import LETTERBOX_GREY, decode, fit, prepare, size_in_square, to_square
from tools.experts.measure import SAMPLES, answers_of
from tools.pictures import as_payload
from tools.training import TrainingError, require_expert_id
from tools.training.detector_loop import (
    Image,
    OnProgress,
    Progress,
    Sample,
    TrainingEffort,
    fit_detector,
    limited_threads,
)
from tools.training.expert_file import STORES, Form, ImportReport
from tools.training.held_out import ImageBoxes, match_boxes
from tools.training.importer import import_model
from tools.training.labelled import Photograph, read_picture, read_yolo_data

#: Share of crops around an object; the others lie anywhere.
_OBJECT_SHARE = 0.9
#: Confidence from which boxes are measured.
_LEAST_SURE = 0.01
#: Pictures of `train` that, with those of `val`, show exposure, sharpness and stripes of all.
_LIMITING = 200
#: Overlap of a hit, as an IoU, in the report.
_HIT_IOU = 0.5


@dataclass(frozen=True, slots=True)
class TrainReport:
    """A trained expert, and how good it is on images that it was not trained on (IoU of a hit above .5).

    Precision, recall and F are at `threshold`, the confidence at which F is best on these images.
    """

    expert: str
    file: Path
    steps: int
    minutes: float
    held_out_images: int
    threshold: float
    precision: float
    recall: float
    f_score: float
    map50: float


@dataclass(frozen=True, slots=True)
class Views:
    """Variation of photographs in training: scaled by 1 ± `zoom`, with `symmetry` in eight turned and mirrored views.

    With `crop` only a square of that many input pixels is shown, nine times in ten around an object.
    """

    symmetry: bool = False
    zoom: float = 0.4
    crop: int | None = None

    def __post_init__(self) -> None:
        if self.crop is not None and self.crop % YOLO_STRIDE_PIXELS:
            raise TrainingError(f"a crop of {self.crop} pixels is not a multiple of {YOLO_STRIDE_PIXELS}")


@dataclass(frozen=True, slots=True)
class PhotographSampler:
    """Makes inputs of a detector from labelled photographs: letterboxed as in the running line.

    With `jitter` they are also moved, scaled, cropped, mirrored left to right, and lit differently.
    """

    photographs: Sequence[Photograph]
    size: int
    jitter: bool
    views: Views = field(default_factory=Views)
    #: Decoded images, shared by samplers of the same photographs; as many as fit `cache_bytes`.
    cache: dict[Path, Image] = field(default_factory=dict)
    cache_bytes: int = 2 * 2**30

    def __call__(self, rng: np.random.Generator) -> Sample:
        views = self.views
        photograph = self.photographs[int(rng.integers(len(self.photographs)))]
        image = self._image(photograph.file)
        height, width = image.shape[:2]
        boxes = photograph.boxes * np.array([width, height, width, height, 1], np.float32)
        if not self.jitter:
            fitted = fit(image, "detect", self.size)
            gains = np.array([fitted.gain_x, fitted.gain_y, fitted.gain_x, fitted.gain_y, 1], np.float32)
            boxes = boxes * gains + np.array([fitted.left, fitted.top, fitted.left, fitted.top, 0], np.float32)
            return _turned(_mirrored((fitted.pixels, boxes), rng), rng) if views.symmetry else (fitted.pixels, boxes)
        gain = (
            size_in_square(width, height, "detect", self.size)[0] / width * rng.uniform(1 - views.zoom, 1 + views.zoom)
        )
        size = views.crop or self.size
        room = size - gain * np.array([width, height])
        x_offset, y_offset = rng.random(2) * room
        if views.crop and len(boxes) and rng.random() < _OBJECT_SHARE:
            box = boxes[int(rng.integers(len(boxes)))]
            centre = gain * (box[:2] + box[2:4]) / 2 + size * rng.uniform(-0.45, 0.45, 2)
            x_offset, y_offset = np.clip(size / 2 - centre, np.minimum(room, 0), 0)
        # OpenCV counts from the centres of pixels, boxes from their corners.
        matrix = np.array([[gain, 0, x_offset + gain / 2 - 0.5], [0, gain, y_offset + gain / 2 - 0.5]])
        grey = (LETTERBOX_GREY,) * 3
        pixels = np.asarray(cv2.warpAffine(image, matrix, (size, size), borderValue=grey), np.uint8)
        offsets = np.array([x_offset, y_offset, x_offset, y_offset, 0], np.float32)
        moved = boxes * np.array([gain] * 4 + [1], np.float32) + offsets
        sample = _mirrored((_relit(pixels, rng), _visible(moved, size)), rng)
        return _turned(sample, rng) if views.symmetry else sample

    def _image(self, file: Path) -> Image:
        if file in self.cache:
            return self.cache[file]
        _, image = read_picture(file)
        if sum(image_in_cache.nbytes for image_in_cache in self.cache.values()) + image.nbytes <= self.cache_bytes:
            self.cache[file] = image
        return image


def train_detector(  # noqa: PLR0913 - most by keyword
    data: Path,
    architecture: str,
    input_size: int,
    out: Path,
    *,
    expert: str,
    effort: TrainingEffort,
    views: Views | None = None,
    store: str = "float32",
    say: Callable[[str], None] = lambda _: None,
    on_progress: OnProgress = lambda _: None,
) -> TrainReport:
    """Train on a YOLO data set, add the expert to `out/catalog.yaml`, and measure it on the set's `val`.

    `say` tells a person what is odd in the data set, before training.
    `store` is the form of the file (STORES); what a thin one loses shows in the report and in the catalog's figures.
    Raises TrainingError.
    """
    require_expert_id(expert)
    photographs = read_yolo_data(data)
    for note in photographs.notes:
        say(note)
    pictures = (*photographs.held_out, *photographs.train[:_LIMITING])  # unreadable ones are named before training
    limits = learn_limits(to_square(read_picture(each.file)[1], "detect", input_size) for each in pictures)
    out.mkdir(parents=True, exist_ok=True)
    jittered = PhotographSampler(photographs.train, input_size, jitter=True, views=views or Views())
    model, last = fit_detector(
        jittered,
        photographs.classes,
        architecture,
        input_size,
        effort,
        closing=replace(jittered, jitter=False),
        on_progress=on_progress,
    )
    form, images = Form(origin=f"trained on {data.name}", store=store), None
    if store != STORES[-1]:  # minutes of training are not thrown away because rounding moved a box
        form = replace(form, tolerance=math.inf)
        images = [read_picture(photograph.file)[1] for photograph in photographs.held_out[:SAMPLES]]
    with limited_threads(effort.threads):
        report = import_model(
            model, architecture, photographs.classes, input_size, out, expert=expert, images=images, form=form
        )
        report.entry["pictures"] = asdict(limits)
        return _measure(report, photographs.held_out, last, out / "catalog.yaml")


def find_boxes(spec: ExpertSpec, payloads: Sequence[bytes]) -> list[ImageBoxes]:
    """Return all but a detector's least sure boxes on encoded images, through a slot and prepared as by the daemon."""
    prepared = (prepare(payload, "image", None, spec) for payload in payloads)
    return [
        ImageBoxes(
            np.array([box.box for box in answer.detections], np.float32).reshape(-1, 4),
            np.array([spec.classes.index(box.label) for box in answer.detections], np.int64),
            np.array([box.confidence for box in answer.detections], np.float32),
        )
        for answer in answers_of(replace(spec, confidence_floor=_LEAST_SURE), prepared)
    ]


def _measure(report: ImportReport, held_out: Sequence[Photograph], last: Progress, catalog: Path) -> TrainReport:
    """Add the expert to the catalog with its confidences on images held out."""
    spec = report.spec
    payloads = [as_payload(photograph.file.read_bytes()) for photograph in held_out]
    truths: list[np.ndarray] = []
    for photograph, payload in zip(held_out, payloads, strict=True):
        height, width = decode(payload, "image").shape[:2]
        truths.append(photograph.boxes * np.array([width, height, width, height, 1], np.float32))
    answers = find_boxes(spec, payloads)
    # An image counts by its surest box, if the expert will answer that box in service.
    surest = [
        (spec.classes[answer.classes[0]], float(answer.confidences[0]))
        for answer in answers
        if len(answer.classes) and answer.confidences[0] >= spec.confidence_floor
    ]
    add_expert(catalog, spec.name, report.entry | {"confidences": histograms(surest)})
    matched = match_boxes(answers, truths, _HIT_IOU)
    threshold = matched.best_threshold()
    counts = matched.counts(threshold)
    return TrainReport(
        expert=spec.name,
        file=report.file,
        steps=last.step,
        minutes=last.spent_s / 60,
        held_out_images=len(held_out),
        threshold=threshold,
        precision=counts.precision,
        recall=counts.recall,
        f_score=counts.f_score,
        map50=matched.mean_average_precision(),
    )


def _visible(boxes: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Return the boxes cut at the square's edges, without those of which less than a third is left."""
    cut = boxes.copy()
    cut[:, :4] = cut[:, :4].clip(0, size)
    visible, whole = ((rows[:, 2] - rows[:, 0]) * (rows[:, 3] - rows[:, 1]) for rows in (cut, boxes))
    return cut[(visible >= whole / 3) & (visible >= 4)]


def _relit(pixels: Image, rng: np.random.Generator) -> Image:
    gains = rng.uniform(0.8, 1.2) * rng.uniform(0.95, 1.05, 3)
    return np.clip(pixels * gains + rng.uniform(-15, 15), 0, 255).astype(np.uint8)


def _mirrored(sample: Sample, rng: np.random.Generator) -> Sample:
    pixels, boxes = sample
    if rng.random() < 0.5:
        pixels = np.ascontiguousarray(pixels[:, ::-1])
        boxes[:, [0, 2]] = pixels.shape[1] - boxes[:, [2, 0]]
    return pixels, boxes


def _turned(sample: Sample, rng: np.random.Generator) -> Sample:
    """Turn a square sample by 0, 90, 180 or 270 degrees, counter-clockwise."""
    pixels, boxes = sample
    turns = int(rng.integers(4))
    for _ in range(turns):
        boxes = boxes[:, [1, 2, 3, 0, 4]]
        boxes[:, [1, 3]] = pixels.shape[0] - boxes[:, [1, 3]]
    return np.ascontiguousarray(np.rot90(pixels, turns)), boxes
