"""Confidences of an expert on images that it was not trained on, to compare its recent answers with."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from daemon.line.making import Draft, draft_of
from experts.catalog import Confidences
from experts.drift import histograms
from experts.editions.edition import Edition, EditionError
from experts.errors import ImageError
from experts.spec import Answer, ExpertSpec
from experts.vision.infer import infer
from experts.vision.preprocess import Image, Prepared, decode, fit
from experts.vision.slot import loaded_slot
from tools.experts.line import ExpertsLine, put_first_in_force
from tools.pictures import as_payload, find_pictures, is_hidden
from tools.terminal.console import CommandError
from tools.terminal.names import legal_name

_BATCH = 8
#: Images of a folder on which experts are timed or compared with their originals; more would not change the result.
SAMPLES = 32
#: More images do not make the comparison of confidences better.
_MAX_IMAGES = 5000


def measure_in_force(line: ExpertsLine, name: str, images: Path, *, discard: bool = False) -> dict[str, Any]:
    """Make an edition with the confidences of the version in force. Raises CommandError, EditionError."""
    if not images.is_dir():
        raise CommandError(f"no folder {images}: name one with images of {name}")
    put_first_in_force(line)
    spec, in_force = line.spec(name), line.expert(name).in_force
    confidences = confidences_of(spec, images)

    def build(before: Edition | None) -> Draft:
        before = before or line.edition()
        entry = before.experts.get(name)
        if entry is None or line.folder.relative_entry(entry) != in_force:
            raise EditionError(f"{name} was changed while it was measured: measure it again")
        draft = draft_of(before, line.folder, "reload", "measure")
        measured = draft.experts[name].model_copy(update={"confidences": dict(confidences)})
        return replace(draft, experts={**draft.experts, name: measured})

    line.make_edition(build, discard=discard)
    counts = {label: list(values) for label, values in confidences.items()}
    return {"expert": name, "version": spec.version, "confidences": counts}


def confidences_of(spec: ExpertSpec, folder: Path) -> Confidences:
    """Return counts by answered label of the images in `folder` and below it. Raises CommandError."""
    if not spec.classes:
        raise CommandError(f"{spec.name} is a backbone, which gives no answers: measure its heads")
    answers = answers_of(spec, images_in(folder, spec, _MAX_IMAGES))
    if not answers:
        raise CommandError(f"{folder}: holds no image that can be decoded")
    return histograms((answer.label, answer.confidence) for answer in answers)


def answers_of(spec: ExpertSpec, images: Iterable[Prepared]) -> list[Answer]:
    """Return the answers that a daemon would give, from a slot. Raises ExpertError."""
    slot, waiting, answers = loaded_slot(spec), iter(images), list[Answer]()
    while batch := list(islice(waiting, _BATCH)):
        answers += infer(slot, batch, spec)
    return answers


def label_folders(folder: Path, min_labels: int = 1) -> dict[str, Path]:
    """Return the folders in `folder` by the names (labels, types) that they have. Raises CommandError."""
    labels: dict[str, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and not is_hidden(Path(path.name)):
            label = legal_name(path.name, path)
            if twin := next((each for each in labels if each.casefold() == label.casefold()), None):
                raise CommandError(f"{labels[twin]} and {path} differ only in case or accents: make one folder of them")
            labels[label] = path
    if len(labels) < min_labels:
        found = f"{min_labels} at least; found {list(labels)}"
        raise CommandError(f"{folder}: expected a subfolder of images for each label, {found}")
    return labels


def images_below(folder: Path, count: int = SAMPLES) -> Iterator[tuple[bytes, Image]]:
    """Yield bytes and pixels of at most `count` images below a folder, spread evenly; skip other files."""
    files = find_pictures(folder).files if folder.is_dir() else []
    # Multiples of the golden ratio: as many as are taken lie evenly among the names, so that no label is left out.
    spread = sorted(range(len(files)), key=lambda place: place * (5**0.5 - 1) / 2 % 1)
    for place in spread:
        if count == 0:
            return
        with suppress(ImageError):
            payload = as_payload(files[place].read_bytes())
            yield payload, decode(payload, "image")
            count -= 1


def images_in(folder: Path, spec: ExpertSpec, count: int = -1) -> Iterator[Prepared]:
    """Yield at most `count` images below a folder, or all."""
    return (fit(image, spec.task, spec.input_size) for _, image in images_below(folder, count))
