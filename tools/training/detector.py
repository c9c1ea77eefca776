"""Trains a detector on a YOLO data set, and measures the expert on the images of the set's `val`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experts.catalog_edit import add_to_catalog
from experts.drift import histograms
from experts.spec import ExpertSpec
from experts.vision.preprocess import decode, prepare
from tools.experts.measure import answers_of
from tools.training import TrainingError
from tools.training.box_scores import ImageBoxes, match_boxes
from tools.training.detector_loop import OnProgress, Progress, TrainingEffort, fit_detector, limited_threads
from tools.training.expert_file import Form, ImportRefusedError, ImportReport, is_expert_id
from tools.training.importer import import_model
from tools.training.photographs import Photograph, PhotographSampler, Views, read_yolo_data

#: Overlap of a hit, as an IoU, in the report.
_HIT_IOU = 0.5


@dataclass(frozen=True, slots=True)
class TrainReport:
    """A trained expert, and how good it is on images that it was not trained on (IoU of a hit above .5).

    Precision, recall and F are at `threshold`, the confidence at which F is best on these images.
    """

    expert: str
    file: Path
    catalog: Path
    steps: int
    minutes: float
    held_out_images: int
    threshold: float
    precision: float
    recall: float
    f_score: float
    map50: float


def train_detector(
    data: Path,
    architecture: str,
    input_size: int,
    out: Path,
    *,
    expert: str,
    effort: TrainingEffort,
    views: Views | None = None,
    on_progress: OnProgress | None = None,
) -> TrainReport:
    """Train on a YOLO data set, add the expert to `out/catalog.yaml`, and measure it on the set's `val`.

    Raises TrainingError.
    """
    if not is_expert_id(expert):  # before minutes of training, not after
        raise TrainingError(f"{expert!r} is not an expert id; use letters, digits and . _ : -")
    photographs = read_yolo_data(data)
    out.mkdir(parents=True, exist_ok=True)
    jittered = PhotographSampler(photographs.train, input_size, jitter=True, views=views or Views())
    last = Progress(0, 0.0, 0.0, 0.0)

    def follow(progress: Progress) -> None:
        nonlocal last
        last = progress
        if on_progress is not None:
            on_progress(progress)

    model = fit_detector(
        jittered,
        photographs.classes,
        architecture,
        input_size,
        effort,
        closing=replace(jittered, jitter=False),
        on_progress=follow,
    )
    form = Form(origin=f"trained on {data.name}")
    with limited_threads(effort.threads):
        try:
            report = import_model(model, architecture, photographs.classes, input_size, out, expert=expert, form=form)
        except ImportRefusedError as error:
            raise TrainingError(str(error)) from error
        return _measure(report, photographs.held_out, last, out / "catalog.yaml")


def find_boxes(spec: ExpertSpec, payloads: Sequence[bytes], floor: float = 0.01) -> list[ImageBoxes]:
    """Return a detector's boxes above `floor` on encoded images, through a slot and prepared as by the daemon."""
    prepared = (prepare(payload, "image", None, spec) for payload in payloads)
    return [
        ImageBoxes(
            np.array([box.box for box in answer.detections], np.float32).reshape(-1, 4),
            np.array([spec.classes.index(box.label) for box in answer.detections], np.int64),
            np.array([box.confidence for box in answer.detections], np.float32),
        )
        for answer in answers_of(replace(spec, confidence_floor=floor), prepared)
    ]


def _measure(report: ImportReport, held_out: Sequence[Photograph], last: Progress, catalog: Path) -> TrainReport:
    """Add the expert to the catalog with its confidences on images held out."""
    spec = report.spec
    payloads = [photograph.file.read_bytes() for photograph in held_out]
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
    add_to_catalog(catalog, spec.expert, report.entry | {"confidences": histograms(surest)})
    matched = match_boxes(answers, truths, _HIT_IOU)
    threshold = matched.best_threshold()
    counts = matched.counts(threshold)
    return TrainReport(
        expert=spec.expert,
        file=report.file,
        catalog=catalog,
        steps=last.step,
        minutes=last.spent_s / 60,
        held_out_images=len(held_out),
        threshold=threshold,
        precision=counts.precision,
        recall=counts.recall,
        f_score=counts.f_score,
        map50=matched.mean_average_precision(),
    )
