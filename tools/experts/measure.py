"""Confidences of an expert on images that it was not trained on, to compare its recent answers with."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from experts.catalog import CatalogFile, Confidences
from experts.catalog_edit import read, replace_entries
from experts.drift import histograms
from experts.errors import ImageError
from experts.spec import Answer, ExpertId, ExpertSpec
from experts.vision.infer import infer
from experts.vision.preprocess import Image, Prepared, decode, prepare
from experts.vision.slot import SlotPool
from tools.experts.line import ExpertsLine
from tools.terminal.console import CommandError

_BATCH = 8
#: Images of a folder on which experts are timed or compared with their originals; more would not change the result.
SAMPLES = 32
#: More images do not make the comparison of confidences better.
_MAX_IMAGES = 5000


def measure_in_force(line: ExpertsLine, name: str, images: Path) -> dict[str, Any]:
    """Write the confidences of the version in force into the catalog. Raises CommandError, VersionsError."""
    if not images.is_dir():
        raise CommandError(f"no folder {images}: name one with images of {name}")
    with line.versions.changing() as change:
        expert = change.expert(name)
        catalog, problems = line.catalog({name: expert.in_force} if expert.in_force is not None else {})
        spec = catalog.get(ExpertId(name))
        if spec is None or problems:
            raise CommandError(problems[0] if problems else f"{name} has no version in force")
        confidences = confidences_of(spec, images)
        change.measured(name, confidences)
    counts = {label: list(values) for label, values in confidences.items()}
    return {"expert": name, "version": spec.version, "confidences": counts}


def confidences_of(spec: ExpertSpec, folder: Path) -> Confidences:
    """Return counts by answered label of the images in `folder` and below it. Raises CommandError."""
    if not spec.classes:
        raise CommandError(f"{spec.name} is a backbone, which gives no answers: measure its heads")
    answers = answers_of(spec, islice(images_in(folder, spec), _MAX_IMAGES))
    if not answers:
        raise CommandError(f"{folder}: holds no image that can be decoded")
    return by_label(answers)


def answers_of(spec: ExpertSpec, images: Iterable[Prepared]) -> list[Answer]:
    """Return the answers that a daemon would give, from a slot. Raises ExpertError."""
    pool = SlotPool("cpu", spec.resident.weights_bytes)
    pool.load(spec.resident)
    answers: list[Answer] = []
    waiting = iter(images)
    while batch := list(islice(waiting, _BATCH)):
        answers += infer(pool.slot(spec.resident.expert), batch, spec)
    return answers


def by_label(answers: Iterable[Answer]) -> Confidences:
    """Return the catalog's counts of an expert's answers to held-out images."""
    return histograms((answer.label, answer.confidence) for answer in answers)


def write_confidences(catalog: Path, answers: Mapping[str, list[Answer]]) -> None:
    for expert, own in answers.items():
        entries = CatalogFile.model_validate(read(catalog.read_text(encoding="utf-8"))).experts
        measured = entries[expert].model_copy(update={"confidences": by_label(own)})
        replace_entries(catalog, entries, {expert: measured})


def images_below(folder: Path, count: int = SAMPLES) -> Iterator[tuple[bytes, Image]]:
    """Yield bytes and pixels of at most `count` images below a folder, spread evenly; skip other files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # Multiples of the golden ratio: as many as are taken lie evenly among the names, so that no label is left out.
    spread = sorted(range(len(files)), key=lambda place: place * (5**0.5 - 1) / 2 % 1)
    for place in spread:
        if count == 0:
            return
        with suppress(ImageError):
            payload = files[place].read_bytes()
            yield payload, decode(payload, "image")
            count -= 1


def images_in(folder: Path, spec: ExpertSpec) -> Iterator[Prepared]:
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        with suppress(ImageError):
            yield prepare(file.read_bytes(), "image", None, spec)
