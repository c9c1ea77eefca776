"""Makes an expert of a trained network: from a file (`coserve import`) or from a framework's model of this process.

Nothing that a file holds runs (`checkpoint.py`).
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from daemon.units import count_text
from daemon.wire.messages import name_in_use
from experts.catalog import add_expert
from experts.vision.architectures import NORMALISATIONS, Architecture
from experts.vision.guards import learn_limits
from experts.vision.networks import build_original, select_head
from experts.vision.preprocess import to_square
from tools.experts.measure import SAMPLES, confidences_of, images_below
from tools.terminal.console import CommandError
from tools.training import TrainingError, architecture_of, class_names
from tools.training.checkpoint import Checkpoint, read_checkpoint, weights_for
from tools.training.expert_file import Form, ImportJob, ImportReport, make_expert
from tools.training.fit import Targets
from tools.training.held_out import HeldOutAnswers, beats
from tools.training.proof import Image, original_outputs, pattern_images, squares

#: Labelled pictures that an import is measured on, and on which a thin file's answers are compared with the original's.
_CALIBRATION_SAMPLES = 200
_UNKNOWN_NORMALISATION = (
    "how its pictures were normalised is not in the file: name --normalize imagenet (torchvision's mean and std), none "
    "(ToTensor() alone) or .5 (Normalize(.5, .5)), or --images with a folder of pictures for each class ({classes}): "
    "then the one that fits is taken"
)
_NOTHING_FITS = (
    "no normalisation and no order of classes fits: name pictures and the --input-size of its training; with another "
    "mean and std, import with --normalize none and write them into catalog.yaml"
)
#: Red, green and blue in a grey picture, as OpenCV and Pillow make it.
_LUMA = (0.299, 0.587, 0.114)
#: The bias of the layer that has an output for each class.
_LAST_BIAS = r"^fc\.bias$|\.cv3\.0\.2\.bias$"


def import_file(  # noqa: PLR0913 - most by keyword
    file: Path,
    architecture: str,
    input_size: int,
    out: Path,
    *,
    classes: Sequence[str] = (),
    expert: str | None = None,
    form: Form | None = None,
    images: Path | None = None,
    samples: Path | None = None,
    normalize: str | None = None,
    on_share: Callable[[float], object] = lambda _: None,
) -> ImportReport:
    """Read `file`, make the expert, named as the file without `expert`, and add it to the catalog of `out`.

    A checkpoint may name its `classes` itself. A classifier needs `normalize`, or `images` in folders of its classes:
    then it is measured on these. The agreement is proved on `images`, or on patterns. The confidences of `samples` go
    into the catalog. Raises CommandError, and then nothing is changed.
    """
    form = form or Form(origin=f"imported from {file.name}")
    kind, has_pictures = architecture_of(architecture, "classify", "detect"), images is not None
    job = ImportJob(kind, tuple(classes), input_size, out, expert or file.stem, form, has_pictures)
    for folder in (images, samples):
        if folder is not None and next(images_below(folder, 1), None) is None:
            raise TrainingError(f"{folder}: is no folder of images that can be decoded; name another one, or none")
    pictures = pattern_images()
    if images is not None:
        files = images_below(images, SAMPLES if form.store == "float32" else _CALIBRATION_SAMPLES)
        pictures = squares([image for _, image in files], kind.task, input_size)
    checkpoint = read_checkpoint(file)
    state = weights_for(kind, checkpoint, file)
    is_unmeasured = kind.task == "classify" and not has_pictures
    named, notes = _classes_of(file, checkpoint, job.classes, is_unmeasured=is_unmeasured)
    job = replace(job, classes=named)
    original = _load_original(kind, state, file, named, notes)
    if checkpoint.end_to_end is not None:
        select_head(original, end_to_end=checkpoint.end_to_end)
    weights = out / f"{job.expert}.safetensors"
    is_new = not weights.exists()
    try:
        fitting, said = _normalised(file, job, original, images, normalize, checkpoint.names_from)
        on_share(0.5)
        job = replace(job, architecture=replace(kind, normalisation=fitting))
        report = replace(_make(original, job, pictures), notes=(*notes, *said))
        if has_pictures:
            report.entry["pictures"] = asdict(learn_limits(pictures))
        if samples is not None:
            report.entry["confidences"] = confidences_of(report.spec, samples)
        add_expert(out / "catalog.yaml", job.expert, report.entry)
    except OSError as error:
        if is_new:
            weights.unlink(missing_ok=True)
        remedy = "correct that, or name another folder with --out"
        raise TrainingError(f"cannot write to {out}: {error.strerror or error}; {remedy}") from error
    return report


def import_model(
    original: nn.Module,
    architecture: str,
    classes: Sequence[str],
    input_size: int,
    out: Path,
    *,
    expert: str,
    images: Sequence[Image] | None = None,
    form: Form | None = None,
) -> ImportReport:
    """Write a framework's model of this process as `out/EXPERT.safetensors`, proved on `images` or patterns.

    `original` has batch norms and stays unchanged: a torchvision ResNet, or an ultralytics DetectionModel, as
    `YOLO(...).model`. Writes no catalog: the report has the entry. Raises TrainingError.
    """
    kind, has_pictures = architecture_of(architecture, "classify", "detect"), images is not None
    job = ImportJob(kind, tuple(classes), input_size, out, expert, form or Form(), has_pictures)
    return _make(copy.deepcopy(original).float().eval(), job, pattern_images() if images is None else images)


def _make(original: nn.Module, job: ImportJob, images: Sequence[Image]) -> ImportReport:
    kind = job.architecture
    inputs = squares(images, kind.task, job.input_size)
    outputs = original_outputs(original, inputs, NORMALISATIONS[kind.normalisation])
    return make_expert(job, original, images, outputs)


def _normalised(
    file: Path, job: ImportJob, original: nn.Module, images: Path | None, stated: str | None, named_by: str
) -> tuple[str, list[str]]:
    """Return the name of the normalisation, and what to say: how well it fits pictures in folders of the classes.

    `named_by`: where the names of classes are from. Raises TrainingError if another normalisation or order fits better.
    """
    if job.architecture.task == "detect":
        if stated not in (None, "none"):
            raise TrainingError(f"{file}: a detector takes pixels as they are: leave --normalize out")
        return "none", []
    pictures, targets = _labelled(images, job) if images is not None else ([], np.zeros(0, np.int64))
    present, classes = {*targets.tolist()}, ",".join(job.classes)
    if stated is None and len(present) < 2:
        raise TrainingError(f"{file}: {_UNKNOWN_NORMALISATION.format(classes=classes)}")
    if not pictures:
        said = [f"not measured: no folder of {images} has the name of a class ({classes})"] if images else []
        return str(stated), said
    answers = {name: _judged(original, pictures, targets, name) for name in ([stated] if stated else NORMALISATIONS)}
    chosen = max(answers, key=lambda name: _fit(answers[name]))
    taken = answers[chosen]
    right = f"right on {taken.right.sum()} of {count_text(len(pictures), 'labelled image')} of {images}"
    if not taken.right.all():
        answers |= {name: _judged(original, pictures, targets, name) for name in NORMALISATIONS if name not in answers}
        if better := _better_way(job, answers, chosen, stated, named_by):
            raise TrainingError(f"{file}: {right} with the classes {classes} and --normalize {chosen}; {better}")
    said = [f"normalisation {chosen}: {right}"]
    if missing := [label for number, label in enumerate(job.classes) if number not in present]:
        said.append(f"not measured: {images} has no pictures of {', '.join(missing)}")
    return chosen, said


def _better_way(
    job: ImportJob, answers: Mapping[str, HeldOutAnswers], chosen: str, stated: str | None, named_by: str
) -> str | None:
    """Return the normalisation and the order of classes with which more is right, None if `chosen` fits."""
    ways = {name: _reordered(each, job.classes) for name, each in answers.items()}
    fitting = max(ways, key=lambda name: _fit(ways[name][1]))
    (order, best), taken = ways[fitting], answers[chosen]
    labels = len(np.unique(taken.targets))
    is_order_wrong = order != job.classes and best.right.sum() > taken.right.sum()
    if not is_order_wrong and not beats(best, taken) and (labels == 1 or _fit(taken)[0] > 1 / labels):
        return None
    if best.right.sum() <= taken.right.sum():
        return _NOTHING_FITS
    changes = [f"--normalize {fitting}"] if fitting != stated else []
    if order != job.classes and named_by:
        changes.append(f"the classes {','.join(order)}: correct {named_by} in the file, or the folders' names")
    elif order != job.classes:
        changes.append(f"--classes {','.join(order)}")
    return f"on {best.right.sum()} with {' '.join(changes)}"


def _labelled(images: Path, job: ImportJob) -> tuple[list[Image], Targets]:
    """Return pictures from the folders below `images` that are named as classes, as many of each, and their classes."""
    names = {path: name_in_use(path.name) for path in sorted(images.rglob("*")) if path.is_dir()}
    folders = {path: job.classes.index(name) for path, name in names.items() if name in job.classes}
    labelled = [
        (to_square(image, "classify", job.input_size), number)
        for folder, number in folders.items()
        for _, image in images_below(folder, max(1, _CALIBRATION_SAMPLES // len(folders)))
    ]
    return [picture for picture, _ in labelled], np.array([number for _, number in labelled], np.int64)


def _judged(original: nn.Module, pictures: Sequence[Image], targets: Targets, normalisation: str) -> HeldOutAnswers:
    logits = torch.cat(original_outputs(original, pictures, NORMALISATIONS[normalisation]))
    return HeldOutAnswers(logits.softmax(1).numpy(), targets, None, np.arange(len(targets)))


def _fit(answers: HeldOutAnswers) -> tuple[float, float]:
    """Return the share of right answers, and the mean log of the right classes' shares."""
    own = answers.shares[answers.rows, answers.targets]
    return float(answers.right.mean()), float(np.log(np.maximum(own, 1e-9)).mean())


def _reordered(answers: HeldOutAnswers, classes: tuple[str, ...]) -> tuple[tuple[str, ...], HeldOutAnswers]:
    """Return the order of the classes in which most answers are right, and the answers in it."""
    from scipy.optimize import linear_sum_assignment

    counts = answers.confusion() + np.eye(len(classes)) / 2  # a class without pictures keeps its place
    _, outputs = linear_sum_assignment(counts, maximize=True)
    order = tuple(classes[int(label)] for label in np.argsort(outputs))
    return order, replace(answers, shares=answers.shares[:, outputs])


def _classes_of(
    file: Path, checkpoint: Checkpoint, given: Sequence[str], *, is_unmeasured: bool
) -> tuple[tuple[str, ...], list[str]]:
    """Return the names to take, of the file or of --classes, and what to say. Raises TrainingError."""
    notes, named_by = [checkpoint.note] if checkpoint.note is not None else [], checkpoint.names_from
    named, held, mistake = class_names(given, "--classes") if given else (), (), "holds no class names"
    try:
        held = class_names(checkpoint.names, f"its {named_by}") if checkpoint.names else ()
    except CommandError as error:
        mistake = str(error)
        if is_unmeasured:
            remedy = "give them in order with --classes, and --images in a folder for each class to measure them on"
            raise TrainingError(f"{file}: {mistake}; {remedy}") from error
        notes.append(f"{file.name}: {mistake}: --classes is taken")
    if not named and not held:
        raise TrainingError(f"{file}: {mistake}; give them in order with --classes")
    if named and held and named != held:
        raise TrainingError(
            f"{file}: its {named_by} says {', '.join(held)}, --classes says {', '.join(named)}: leave --classes "
            "out, or save the weights without those names"
        )
    if held:
        notes.append(f"classes {', '.join(held)}, from {named_by} of {file.name}")
    return named or held, notes


def _load_original(
    kind: Architecture, state: Mapping[str, torch.Tensor], file: Path, classes: Sequence[str], notes: list[str]
) -> nn.Module:
    """Return the framework's model with these weights."""
    count = next((len(bias) for name, bias in state.items() if re.search(_LAST_BIAS, name)), len(classes))
    if count != len(classes) or (count == 1 and kind.task == "classify"):  # one would always be sure
        remedy = "name one for each with --classes, in the network's order"
        raise TrainingError(
            f"{file}: the network has {count_text(count, 'output')}, and the classes are {', '.join(classes[:12])}: "
            f"{remedy if count > 1 else 'train it with an output for each of two at least'}"
        )
    original = build_original(kind, count)
    first, _ = next(original.named_parameters())
    if state[first].shape[1] == 1:
        state = {**state, first: state[first] * torch.tensor(_LUMA).view(1, 3, 1, 1)}
        notes.append(f"{file.name}: its first layer takes one channel: it is given the luma of pictures")
    try:
        original.load_state_dict(dict(state), strict=True)
    except RuntimeError as error:
        message = f"its last layer is not that of a {kind.name} with {count_text(count, 'class', 'classes')}"
        line = str(error).splitlines()[1].strip()[:200]
        raise TrainingError(f"{file}: {message} ({line}): train a {kind.name} that is not changed") from error
    return original.float().eval()
