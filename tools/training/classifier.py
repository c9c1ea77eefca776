"""Trains a classifier on a folder of labelled images, and measures the expert on images held out."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from daemon.units import count_text
from experts.catalog_edit import add_to_catalog
from experts.errors import ImageError
from experts.vision.architectures import ARCHITECTURES
from experts.vision.preprocess import decode, to_square
from experts.vision.preprocess import fit as fit_image
from tools.experts.measure import answers_of, by_label
from tools.training import TrainingError, fit
from tools.training.expert_file import Form, ImportRefusedError, is_expert_id
from tools.training.fit import Pictures, Targets
from tools.training.importer import import_model

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff"}
_HELD_OUT_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class LabelReport:
    """A label on held-out images: how many there were, how many were recognised."""

    label: str
    held_out: int
    right: int


@dataclass(frozen=True, slots=True)
class ClassifierReport:
    """A trained expert, and how often it is right on images that it was not trained on."""

    expert: str
    file: Path
    trained: int
    temperature: float
    labels: tuple[LabelReport, ...]

    @property
    def accuracy(self) -> float:
        return sum(label.right for label in self.labels) / max(sum(label.held_out for label in self.labels), 1)


@dataclass(frozen=True, slots=True)
class _LabelledPictures:
    pictures: Pictures
    targets: Targets

    def subset(self, places: np.ndarray) -> "_LabelledPictures":
        return _LabelledPictures(self.pictures[places], self.targets[places])


def train_classifier(
    folder: Path,
    architecture: str,
    input_size: int,
    out: Path,
    *,
    expert: str,
    schedule: fit.Schedule,
    threads: int,
    on_progress: fit.OnProgress = lambda _: None,
) -> ClassifierReport:
    """Train on `folder/LABEL/*.png`, add the expert to the catalog of `out`, and measure it on a fifth held out.

    Labels with few images count as much as those with many. Raises TrainingError.
    """
    kind = ARCHITECTURES.get(architecture)
    if kind is None or kind.task != "classify":
        raise TrainingError(f"{architecture!r} is not a classifier: expected resnet18, 34, 50, 101 or 152")
    if not is_expert_id(expert):  # before minutes of training, not after
        raise TrainingError(f"{expert!r} is not an expert id; give one of letters, digits and . _ : - with --id")
    torch.set_num_threads(threads)
    torch.manual_seed(schedule.seed)
    labels, pictures = _read(folder, input_size)
    rng = np.random.default_rng(schedule.seed)
    train, held_out = _split(pictures, rng)
    balanced = _balanced(train, rng)
    network = fit.new_network(architecture, len(labels))
    fit.fit_network(network, balanced.pictures, balanced.targets, schedule, on_progress)
    logits = fit.logits_of(network, held_out.pictures)
    form = Form(origin=f"trained on {folder.name}")
    images = list(held_out.pictures[:8])
    try:
        report = import_model(network, architecture, labels, input_size, out, expert=expert, images=images, form=form)
    except ImportRefusedError as error:
        raise TrainingError(str(error)) from error
    temperature = fit.calibrate(logits, held_out.targets)
    # The expert as it will be served, so that its answers in service can be compared with these.
    served = replace(report.spec, temperature=temperature)
    answers = answers_of(served, [fit_image(picture, "classify", input_size) for picture in held_out.pictures])
    entry = report.entry | {"temperature": temperature, "confidences": by_label(answers)}
    add_to_catalog(out / "catalog.yaml", expert, entry)
    answered = logits.argmax(1).numpy()
    reports: list[LabelReport] = []
    for number, label in enumerate(labels):
        mine = held_out.targets == number
        reports.append(LabelReport(label, int(mine.sum()), int((answered[mine] == number).sum())))
    return ClassifierReport(expert, report.file, len(train.targets), temperature, tuple(reports))


def _read(folder: Path, input_size: int) -> tuple[list[str], _LabelledPictures]:
    labels = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if len(labels) < 2:
        raise TrainingError(f"{folder}: expected a subfolder of images for each label, two at least; found {labels}")
    pictures: list[np.ndarray] = []
    targets: list[int] = []
    for number, label in enumerate(labels):
        files = sorted(path for path in (folder / label).iterdir() if path.suffix.lower() in SUFFIXES)
        if len(files) < 2:
            raise TrainingError(
                f"{folder / label}: holds {count_text(len(files), 'image')}, two at least are needed (png, jpg, bmp,"
                " tif)"
            )
        for file in files:
            try:
                pictures.append(to_square(decode(file.read_bytes(), "image", None), "classify", input_size))
            except ImageError as error:
                raise TrainingError(f"{file}: {error.reason}; take it out of the folder") from error
            targets.append(number)
    return labels, _LabelledPictures(np.stack(pictures), np.array(targets))


def _split(pictures: _LabelledPictures, rng: np.random.Generator) -> tuple[_LabelledPictures, _LabelledPictures]:
    """Hold out a fifth of each label, one image at least."""
    held_out = np.zeros(len(pictures.targets), bool)
    for target in np.unique(pictures.targets):
        order = rng.permutation(np.nonzero(pictures.targets == target)[0])
        held_out[order[: max(1, round(len(order) * _HELD_OUT_SHARE))]] = True
    return pictures.subset(~held_out), pictures.subset(held_out)


def _balanced(train: _LabelledPictures, rng: np.random.Generator) -> _LabelledPictures:
    """Repeat images of rare labels, so that each label is seen as often as the most frequent."""
    counts = Counter(train.targets.tolist())
    largest = max(counts.values())
    order = np.concatenate(
        [np.resize(rng.permutation(np.nonzero(train.targets == target)[0]), largest) for target in sorted(counts)]
    )
    return train.subset(order)
