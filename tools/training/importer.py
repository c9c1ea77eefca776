"""Makes an expert of a trained network: from a file (`coserve import`) or from a framework's model of this process.

Nothing that a file holds runs (`checkpoint.py`).
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from daemon.units import count_text
from experts.catalog import add_expert
from experts.vision.architectures import NORMALISATIONS, Architecture
from experts.vision.guards import learn_limits
from experts.vision.networks import build_original, select_head
from experts.vision.preprocess import to_square
from tools.experts.measure import SAMPLES, images_below
from tools.training import TrainingError, architecture_of
from tools.training.checkpoint import Checkpoint, class_names, read_checkpoint, weights_for
from tools.training.expert_file import (
    Form,
    ImportJob,
    ImportReport,
    make_expert,
)
from tools.training.fit import Targets
from tools.training.held_out import HeldOutAnswers, beats
from tools.training.proof import LUMA, Image, OriginalOutputs, original_outputs, pattern_images, squares

#: Labelled pictures that an import is measured on, and on which a thin file's answers are compared with the original's.
_CALIBRATION_SAMPLES = 200
_UNKNOWN_NORMALISATION = (
    "how its pictures were normalised is not in the file: name --normalize imagenet (torchvision's mean and std), none "
    "(ToTensor() alone) or .5 (Normalize(.5, .5)), or --images with a folder of pictures for each class ({classes}): "
    "then the one that fits is taken"
)
#: The bias of the layer that has an output for each class.
_LAST_BIAS = r"^fc\.bias$|\.cv3\.0\.2\.bias$"
_OWN_NORMALISATION = "with another mean and std, import with --normalize none and write them into catalog.yaml"


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
    normalize: str | None = None,
) -> ImportReport:
    """Read `file`, make the expert, named as the file without `expert`, and add it to the catalog of `out`.

    A checkpoint may name its `classes` itself. A classifier needs `normalize`, or `images` in folders of its classes:
    then it is measured on these. The agreement is proved on `images`, or on patterns. Raises TrainingError, and then
    nothing is changed.
    """
    form = form or Form(origin=f"imported from {file.name}")
    kind, has_pictures = architecture_of(architecture, "classify", "detect"), images is not None
    job = ImportJob(kind, tuple(classes), input_size, out, expert or file.stem, form, has_pictures)
    if normalize not in (None, "none") and kind.task == "detect":
        raise TrainingError(f"--normalize {normalize}: a {kind.name} takes pixels as they are; leave --normalize out")
    pictures = pattern_images()
    if images is not None:
        files = images_below(images, SAMPLES if form.store == "float32" else _CALIBRATION_SAMPLES)
        pictures = [to_square(image, kind.task, input_size) for _, image in files]
    if not pictures:
        what = "holds no image that can be decoded" if images is not None and images.is_dir() else "is not a folder"
        raise TrainingError(f"{images}: {what}; name another folder, or none")
    checkpoint = read_checkpoint(file)
    state = weights_for(kind, checkpoint, file)
    named, notes = _classes_of(file, checkpoint, job.classes)
    job = replace(job, classes=named)
    original = _load_original(kind, state, file, named)
    if checkpoint.end_to_end is not None:
        select_head(original, end_to_end=checkpoint.end_to_end)
    weights = out / f"{job.expert}.safetensors"
    is_new = not weights.exists()
    try:
        if kind.task == "classify":
            normalize, said = _normalised(file, job, original, images, normalize, checkpoint.names_from)
            notes, job = [*notes, *said], replace(job, architecture=replace(kind, normalisation=normalize))
        outputs = _outputs(job, original, pictures)
        report = replace(make_expert(job, _three_channels(original), pictures, outputs), notes=tuple(notes))
        if has_pictures:
            report.entry["pictures"] = asdict(learn_limits(pictures))
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
    return _import_original(copy.deepcopy(original), job, images if images is not None else pattern_images())


def _import_original(original: nn.Module, job: ImportJob, images: Sequence[Image]) -> ImportReport:
    model = original.float().eval()
    outputs = _outputs(job, model, images)
    return make_expert(job, _three_channels(model), images, outputs)


def _outputs(job: ImportJob, original: nn.Module, images: Sequence[Image]) -> OriginalOutputs:
    inputs = squares(images, job.architecture.task, job.input_size)
    return original_outputs(original, inputs, NORMALISATIONS[job.architecture.normalisation])


def _set_first_layer(network: nn.Module, weight: torch.Tensor) -> None:
    name, _ = next(network.named_parameters())
    layer: Any = network.get_submodule(name.removesuffix(".weight"))
    layer.weight, layer.in_channels = nn.Parameter(weight.detach().float()), weight.shape[1]


def _three_channels(network: nn.Module) -> nn.Module:
    """Make a network of grey pictures one of RGB: of grey ones the same answer, of coloured ones that of their luma."""
    weight = next(network.parameters())
    if weight.shape[1] == 1:
        _set_first_layer(network, weight * torch.tensor(LUMA).view(1, 3, 1, 1))
    return network


def _normalised(
    file: Path, job: ImportJob, original: nn.Module, images: Path | None, stated: str | None, named_by: str
) -> tuple[str, list[str]]:
    """Return the name of the normalisation, and what to say: how well it fits pictures in folders of the classes.

    `named_by`: where the names of classes are from. Raises TrainingError if another normalisation or order fits better.
    """
    is_grey = next(original.parameters()).shape[1] == 1
    known = [name for name in NORMALISATIONS if not is_grey or name != "imagenet"]
    if stated not in {None, *known}:
        raise TrainingError(f"{file}: its first layer takes one channel: --normalize is {' or '.join(known)}")
    pictures, targets = _labelled(images, job) if images is not None else ([], np.zeros(0, np.int64))
    present, classes = {*targets.tolist()}, ",".join(job.classes)
    if stated is None and len(present) < 2:
        raise TrainingError(f"{file}: {_UNKNOWN_NORMALISATION.format(classes=classes)}")
    if not pictures:
        said = [f"not measured: no folder of {images} has the name of a class ({classes})"] if images else []
        return str(stated), said
    answers = {name: _judged(original, pictures, targets, name) for name in ([stated] if stated else known)}
    chosen = max(answers, key=lambda name: _fit(answers[name]))
    taken = answers[chosen]
    if not taken.right.all():
        answers |= {name: _judged(original, pictures, targets, name) for name in known if name not in answers}
    ways = {(name, job.classes): each for name, each in answers.items()}
    ways |= {(name, order): each for name, each in answers.items() for order, each in [_reordered(each, job.classes)]}
    name, order = max(ways, key=lambda way: _fit(ways[way]))
    of = f"of {count_text(len(pictures), 'labelled image')} of {images}"
    if beats(ways[name, order], taken) or (len(present) > 1 and _fit(taken)[0] <= 1 / len(present)):
        better = [f"--normalize {name}"] if name != stated else []
        if order != job.classes:
            better.append(f"--classes {','.join(order)}")
            if named_by:
                better[-1] = f"the classes {','.join(order)}: correct {named_by} in the file, or the folders' names"
        instead = f"on {ways[name, order].right.sum()} with {' '.join(better)}"
        if ways[name, order].right.sum() <= taken.right.sum():
            training = "name pictures and the --input-size of its training"
            instead = f"no normalisation and no order of classes fits: {training}; {_OWN_NORMALISATION}"
        used = f"the classes {classes} and --normalize {chosen}"
        raise TrainingError(f"{file}: right on {taken.right.sum()} {of} with {used}; {instead}")
    others = ", ".join(f"{name} on {each.right.sum()}" for name, each in answers.items() if name != chosen)
    said = [f"normalisation {chosen}: right on {taken.right.sum()} {of}{f' ({others})' if others else ''}"]
    if missing := [label for number, label in enumerate(job.classes) if number not in present]:
        said.append(f"not measured: {images} has no pictures of {', '.join(missing)}")
    return chosen, said


def _labelled(images: Path, job: ImportJob) -> tuple[list[Image], Targets]:
    """Return pictures from the folders below `images` that are named as classes, as many of each, and their classes."""
    folders = [path for path in sorted(images.rglob("*")) if path.is_dir() and path.name in job.classes]
    labelled = [
        (to_square(image, "classify", job.input_size), job.classes.index(folder.name))
        for folder in folders
        for _, image in images_below(folder, max(1, _CALIBRATION_SAMPLES // len(folders)))
    ]
    return [picture for picture, _ in labelled], np.array([number for _, number in labelled], np.int64)


def _judged(original: nn.Module, pictures: Sequence[Image], targets: Targets, normalisation: str) -> HeldOutAnswers:
    logits = torch.cat(original_outputs(original, pictures, NORMALISATIONS[normalisation]))
    return HeldOutAnswers(logits.softmax(1).numpy(), targets, None, np.arange(len(targets)))


def _fit(answers: HeldOutAnswers) -> tuple[float, float]:
    """Return the share of right answers, each class counting as much, and the mean log of the right classes' shares."""
    recalls = [answers.right[answers.targets == target].mean() for target in np.unique(answers.targets)]
    own = answers.shares[np.arange(len(answers.targets)), answers.targets]
    return float(np.mean(recalls)), float(np.log(np.maximum(own, 1e-9)).mean())


def _reordered(answers: HeldOutAnswers, classes: tuple[str, ...]) -> tuple[tuple[str, ...], HeldOutAnswers]:
    """Return the order of the classes in which most answers are right, and the answers in it."""
    from scipy.optimize import linear_sum_assignment

    counts = answers.confusion() + np.eye(len(classes)) / 2  # a class without pictures keeps its place
    _, outputs = linear_sum_assignment(counts, maximize=True)
    order = tuple(classes[int(label)] for label in np.argsort(outputs))
    return order, replace(answers, shares=answers.shares[:, outputs])


def _classes_of(file: Path, checkpoint: Checkpoint, named: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """Return the names to take, of the file or of --classes, and what to say. Raises TrainingError."""
    notes = [checkpoint.note] if checkpoint.note is not None else []
    if named and (mistake := class_names(named)[1]) is not None:
        raise TrainingError(f"--classes {mistake}: give each class a name of its own")
    names_from = checkpoint.names_from
    held, mistake = class_names(checkpoint.names) if names_from else ([], None)
    names, is_numbered = tuple(map(str, held)), any(not isinstance(name, str) for name in held)
    if not named and (mistake is not None or held == [*range(len(held))]):
        lack = f"its {names_from} {mistake}" if mistake is not None else "holds weights without class names"
        raise TrainingError(f"{file}: {lack}; give them in order with --classes")
    if mistake is not None:
        notes.append(f"{file.name}: its {names_from} {mistake}: --classes is taken")
    if mistake is not None or held == [*range(len(held))]:
        return named, notes
    if named and named != names:
        raise TrainingError(
            f"{file}: its {names_from} says {', '.join(names)}, --classes says {', '.join(named)}: leave --classes "
            "out, or save the weights without those names"
        )
    lost = " (numbers there: did YAML drop a leading 0?)" if is_numbered else ""
    return names, [*notes, f"classes {', '.join(names)}, from {names_from} of {file.name}{lost}"]


def _load_original(
    kind: Architecture, state: Mapping[str, torch.Tensor], file: Path, classes: Sequence[str]
) -> nn.Module:
    """Return the framework's model with these weights; its first layer takes as many channels as theirs."""
    count = next((len(bias) for name, bias in state.items() if re.search(_LAST_BIAS, name)), len(classes))
    if count != len(classes):
        remedy = (
            "name one for each with --classes, in the network's order"
            if count > 1
            else "train it with an output for each"
        )
        named = ", ".join(classes[:12])
        raise TrainingError(
            f"{file}: the network has {count_text(count, 'output')}, and the classes are {named}: {remedy}"
        )
    original = build_original(kind, count)
    name, first = next(original.named_parameters())
    if state[name].shape[1] != first.shape[1]:
        _set_first_layer(original, state[name])
    try:
        original.load_state_dict(dict(state), strict=True)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:4]]
        message = f"{file}: the weights are not those of a {kind.name} with {count_text(count, 'class', 'classes')}"
        remedy = f"import one that was trained as a plain {kind.name}"
        raise TrainingError(f"{message}: {' '.join(lines)[:300]}; {remedy}") from error
    return original.float().eval()
