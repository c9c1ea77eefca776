"""How sure an expert is of images that it was not trained on: what its recent answers are compared with later."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from experts.catalog import Confidences
from experts.drift import histograms
from experts.errors import ExpertError, ImageError
from experts.slot import SlotPool
from experts.spec import Answer, ExpertId, ExpertSpec
from experts.vision.infer import infer
from experts.vision.preprocess import Prepared, prepare
from tools.experts.line import ExpertsLine

_BATCH = 8
#: More say nothing that so many do not.
_MOST_IMAGES = 5000


class MeasureError(Exception):
    """There is nothing to measure; the text says why."""


def measure_in_force(line: ExpertsLine, name: str, images: Path) -> dict[str, Any]:
    """Write the confidences of the version in force into the catalog. Raises MeasureError, VersionsError."""
    if not images.is_dir():
        raise MeasureError(f"no folder {images}: name one with images of {name}")
    with line.versions.changing() as change:
        expert = change.expert(name)
        catalog, problems = line.catalog({name: expert.in_force} if expert.in_force is not None else {})
        spec = catalog.get(ExpertId(name))
        if spec is None or problems:
            raise MeasureError(problems[0] if problems else f"{name} has no version in force")
        found = confidences_of(spec, images)
        change.measured(name, found)
    return {"expert": name, "version": spec.version, "confidences": {key: list(value) for key, value in found.items()}}


def confidences_of(spec: ExpertSpec, folder: Path) -> Confidences:
    """Counts by answered label of the images in `folder` and below it. Raises MeasureError."""
    pool = SlotPool("cpu", spec.weights_bytes)
    answers: list[Answer] = []
    try:
        pool.load(spec)
        images = islice(_images(folder, spec), _MOST_IMAGES)
        while some := list(islice(images, _BATCH)):
            answers += infer(pool.slot(spec.expert), some)
    except ExpertError as error:
        raise MeasureError(str(error)) from error
    if not answers:
        raise MeasureError(f"{folder}: holds no image that can be decoded")
    return by_label(answers)


def by_label(answers: Sequence[Answer]) -> Confidences:
    """What the catalog keeps of an expert's answers to images held out."""
    return histograms((answer.label, answer.confidence) for answer in answers)


def _images(folder: Path, spec: ExpertSpec) -> Iterator[Prepared]:
    """Files that are no images are passed over."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            try:
                yield prepare(file.read_bytes(), "image", None, spec)
            except ImageError:
                continue
