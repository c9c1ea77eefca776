"""`coserve train classifier`: any folder of labelled images becomes an expert, measured on images held out."""

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from experts.catalog import add_to_catalog
from experts.errors import ImageError
from experts.vision.architectures import ARCHITECTURES
from experts.vision.decode import decode
from experts.vision.preprocess import fit as fit_image
from experts.vision.preprocess import to_square
from tools.experts.measure import answers_of, by_label
from tools.training import fit
from tools.training.expert_file import Form, ImportRefusedError
from tools.training.fit import Pictures, Targets
from tools.training.importer import import_classifier

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff"}
_HELD_OUT_SHARE = 0.2


class TrainingError(Exception):
    """The images cannot be trained on; the text says which, and what to do."""


@dataclass(frozen=True, slots=True)
class LabelReport:
    """One label on held-out images: how many there were, how many were recognised."""

    label: str
    held_out: int
    right: int


@dataclass(frozen=True, slots=True)
class ClassifierReport:
    """What was trained, and how often it is right on images it has not seen."""

    expert: str
    file: Path
    trained: int
    temperature: float
    labels: tuple[LabelReport, ...]

    @property
    def accuracy(self) -> float:
        return sum(label.right for label in self.labels) / max(sum(label.held_out for label in self.labels), 1)


@dataclass(frozen=True, slots=True)
class _Set:
    pictures: Pictures
    targets: Targets


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
    """Train on `folder/LABEL/*.png`, import the expert into `out` and its catalog, measure it on a fifth held out.

    Labels with few images count as much as those with many. Raises TrainingError.
    """
    known = ARCHITECTURES.get(architecture)
    if known is None or known.task != "classify":
        raise TrainingError(f"{architecture!r} is no classifier: expected resnet18, 34, 50, 101 or 152")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", expert):  # said before minutes of training, not after
        raise TrainingError(f"{expert!r} is no expert id; give one of letters, digits and . _ : - with --id")
    torch.set_num_threads(threads)
    torch.manual_seed(schedule.seed)
    labels, everything = _read(folder, input_size)
    rng = np.random.default_rng(schedule.seed)
    train, held_out = _split(everything, rng)
    balanced = _balanced(train, rng)
    network = fit.new_network(architecture, len(labels))
    fit.fit_network(network, balanced.pictures, balanced.targets, schedule, on_progress)
    logits = fit.logits_of(network, held_out.pictures)
    form = Form(origin=f"trained on {folder.name}")
    images = list(held_out.pictures[:8])
    try:
        report = import_classifier(
            network.state_dict(), architecture, labels, input_size, out, expert=expert, images=images, form=form
        )
    except ImportRefusedError as error:
        raise TrainingError(str(error)) from error
    temperature = fit.calibrate(logits, held_out.targets)
    # As it will be served, so that its answers in service can be compared with these.
    served = replace(report.spec, temperature=temperature)
    answers = answers_of(served, [fit_image(picture, "classify", input_size) for picture in held_out.pictures])
    entry = report.entry | {"temperature": temperature, "confidences": by_label(answers)}
    add_to_catalog(out / "catalog.yaml", expert, entry)
    found = logits.argmax(1).numpy()
    return ClassifierReport(expert, report.file, len(train.targets), temperature, _by_label(labels, found, held_out))


def _read(folder: Path, input_size: int) -> tuple[list[str], _Set]:
    labels = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if len(labels) < 2:
        raise TrainingError(f"{folder}: expected a subfolder of images for each label, two at least; found {labels}")
    pictures: list[np.ndarray] = []
    targets: list[int] = []
    for number, label in enumerate(labels):
        files = sorted(path for path in (folder / label).iterdir() if path.suffix.lower() in SUFFIXES)
        if len(files) < 2:
            raise TrainingError(
                f"{folder / label}: holds {len(files)} images, two at least are needed (png, jpg, bmp, tif)"
            )
        for file in files:
            try:
                pictures.append(to_square(decode(file.read_bytes(), "image", None), "classify", input_size))
            except ImageError as error:
                raise TrainingError(f"{file}: {error.reason}; take it out of the folder") from error
            targets.append(number)
    return labels, _Set(np.stack(pictures), np.array(targets))


def _split(everything: _Set, rng: np.random.Generator) -> tuple[_Set, _Set]:
    """A fifth of each label, one image at least, is held out."""
    held: list[int] = []
    for target in np.unique(everything.targets):
        mine = rng.permutation(np.nonzero(everything.targets == target)[0])
        held += mine[: max(1, round(len(mine) * _HELD_OUT_SHARE))].tolist()
    chosen = np.isin(np.arange(len(everything.targets)), held)
    parts = [_Set(everything.pictures[mask], everything.targets[mask]) for mask in (~chosen, chosen)]
    return parts[0], parts[1]


def _balanced(train: _Set, rng: np.random.Generator) -> _Set:
    """Images of rare labels several times, so that each label is seen as often as the most frequent."""
    counts = Counter(train.targets.tolist())
    most = max(counts.values())
    order = np.concatenate(
        [np.resize(rng.permutation(np.nonzero(train.targets == target)[0]), most) for target in sorted(counts)]
    )
    return _Set(train.pictures[order], train.targets[order])


def _by_label(labels: list[str], found: np.ndarray, held_out: _Set) -> tuple[LabelReport, ...]:
    return tuple(
        LabelReport(label, int((held_out.targets == n).sum()), int(((found == n) & (held_out.targets == n)).sum()))
        for n, label in enumerate(labels)
    )
