"""`coserve train detector`: a YOLO data set becomes a detector of the catalog, measured on images held out."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from experts.catalog import CatalogFile, add_to_catalog, resolve
from experts.catalog_edit import read
from experts.drift import histograms
from experts.slot import SlotPool
from experts.spec import ExpertId, ExpertSpec
from experts.vision.decode import decode
from experts.vision.infer import infer
from experts.vision.preprocess import prepare
from tools.deeppcb.measure import Found, average_precisions, choose_threshold, count, mean_average_precision
from tools.training.detector_loop import Effort, OnProgress, Progress, TrainingError, fit_detector, limited_threads
from tools.training.expert_file import Form, ImportRefusedError
from tools.training.importer import import_detector
from tools.training.photographs import Photograph, PhotographSampler, read_yolo_data


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
    effort: Effort,
    on_progress: OnProgress | None = None,
) -> TrainReport:
    """Train on a YOLO data set, make the network an expert of `out/catalog.yaml`, and measure it on the set's `val`.

    A training that was interrupted goes on where it was when it is started again. Raises TrainingError.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", expert):
        # The import would say so too, but only after the minutes of training.
        raise TrainingError(f"{expert!r} is no expert id; use letters, digits and . _ : -")
    found = read_yolo_data(data)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / f".{expert}.training"
    jittered = PhotographSampler(found.train, input_size, jitter=True)
    steady = replace(jittered, jitter=False)
    last = Progress(0, 0.0, 0.0, 0.0)

    def follow(progress: Progress) -> None:
        nonlocal last
        last = progress
        if on_progress is not None:
            on_progress(progress)

    model = fit_detector(
        jittered,
        found.classes,
        architecture,
        input_size,
        effort,
        closing=steady,
        checkpoint=checkpoint,
        on_progress=follow,
    )
    with limited_threads(effort.threads):
        try:
            spec = add_detector(model, architecture, found.classes, input_size, out, expert=expert, origin=data.name)
        except ImportRefusedError as error:
            raise TrainingError(f"{error}; the training itself is kept in {checkpoint}") from error
        checkpoint.unlink(missing_ok=True)
        return _report(spec, found.held_out, last, out / "catalog.yaml")


def add_detector(
    model: nn.Module,
    architecture: str,
    classes: Sequence[str],
    input_size: int,
    out: Path,
    *,
    expert: str,
    origin: str,
) -> ExpertSpec:
    """A trained model as an expert of `out/catalog.yaml`."""
    form = Form(origin=f"trained on {origin}")
    report = import_detector(model, architecture, input_size, out, expert=expert, classes=classes, form=form)
    add_to_catalog(out / "catalog.yaml", expert, report.entry)
    catalog, _ = resolve(CatalogFile.model_validate({"experts": {expert: report.entry}}), out)
    return catalog[ExpertId(expert)]


def find_boxes(spec: ExpertSpec, payloads: Sequence[bytes], floor: float = 0.01) -> list[Found]:
    """What a detector finds on encoded images, through a slot and as the daemon prepares them; boxes above `floor`."""
    pool = SlotPool("cpu", spec.weights_bytes)
    pool.load(replace(spec, confidence_floor=floor))
    slot = pool.slot(spec.expert)
    found: list[Found] = []
    for payload in payloads:
        boxes = infer(slot, [prepare(payload, "image", None, spec)])[0].detections
        found.append(
            Found(
                np.array([box.box for box in boxes], np.float32).reshape(-1, 4),
                np.array([spec.classes.index(box.label) for box in boxes], np.int64),
                np.array([box.confidence for box in boxes], np.float32),
            )
        )
    return found


def _report(spec: ExpertSpec, held_out: Sequence[Photograph], last: Progress, catalog: Path) -> TrainReport:
    payloads = [photograph.file.read_bytes() for photograph in held_out]
    truths: list[NDArray[np.float32]] = []
    for photograph, payload in zip(held_out, payloads, strict=True):
        height, width = decode(payload, "image").shape[:2]
        truths.append(photograph.boxes * np.array([width, height, width, height, 1], np.float32))
    found = find_boxes(spec, payloads)
    add_to_catalog(catalog, spec.expert, _entry(catalog, spec.expert) | {"confidences": _confidences(spec, found)})
    threshold = choose_threshold(found, truths, 0.5)
    counts = count(found, truths, threshold, 0.5)
    return TrainReport(
        expert=spec.expert,
        file=spec.file,
        catalog=catalog,
        steps=last.step,
        minutes=last.spent_s / 60,
        held_out_images=len(held_out),
        threshold=threshold,
        precision=counts.precision,
        recall=counts.recall,
        f_score=counts.f_score,
        map50=mean_average_precision(average_precisions(found, truths, len(spec.classes), 0.5)),
    )


def _confidences(spec: ExpertSpec, found: Sequence[Found]) -> dict[str, tuple[int, ...]]:
    """Of each image's surest box, as far as it will be answered: that is what a detector's answer is counted by."""
    surest = [(one.classes[place], one.confidences[place]) for one in found for place in one.confidences.argsort()[-1:]]
    kept = [(kind, confidence) for kind, confidence in surest if confidence >= spec.confidence_floor]
    return histograms((spec.classes[kind], float(confidence)) for kind, confidence in kept)


def _entry(catalog: Path, expert: str) -> dict[str, Any]:
    return CatalogFile.model_validate(read(catalog.read_text(encoding="utf-8"))).experts[expert].model_dump(mode="json")
