"""Makes an expert of a trained network: from a file (`coserve import`) or from a framework's model of this process.

Nothing here unpickles unknown classes. A file of plain tensors is read with `weights_only`; an ultralytics `.pt`, which
is a pickled program, is opened only on request and only in a process of its own (`tools/training/unpickle.py`).
"""

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experts.catalog import add_expert
from experts.vision.architectures import NORMALISATIONS, Architecture
from experts.vision.networks import build_original, select_head
from experts.vision.preprocess import to_square
from tools.experts.measure import SAMPLES, images_below
from tools.training.expert_file import (
    Form,
    ImportJob,
    ImportRefusedError,
    ImportReport,
    check_request,
    known_architecture,
    make_expert,
)
from tools.training.proof import Image, original_outputs, pattern_images, squares
from tools.training.unpickle import unpickle_elsewhere

#: Pictures on which a thin file's answers are compared with the original's.
_CALIBRATION_SAMPLES = 200


@dataclass(frozen=True, slots=True)
class ImportTarget:
    """The expert that a file becomes.

    None: the classes that an ultralytics `.pt` names, the file's name as the expert's id.
    """

    architecture: str
    input_size: int
    out: Path
    classes: tuple[str, ...] | None = None
    expert: str | None = None
    form: Form | None = None


def import_file(file: Path, target: ImportTarget, *, images: Path | None = None, trust: bool = False) -> ImportReport:
    """Read `file`, make the expert, and add it to the catalog of `target.out`.

    The agreement is proved on the folder `images`, or on patterns. `trust` allows a pickled program to run in a
    process of its own. Raises ImportRefusedError, and then nothing is changed.
    """
    expert = target.expert or file.stem
    form = target.form or Form(origin=f"imported from {file.name}")
    kind = known_architecture(target.architecture)
    check_request(kind, target.input_size, expert, form, has_pictures=images is not None)
    pictures = pattern_images()
    if images is not None:
        files = images_below(images, SAMPLES if form.store == "float32" else _CALIBRATION_SAMPLES)
        pictures = [to_square(image, kind.task, target.input_size) for _, image in files]
    if not pictures:
        what = "holds no image that can be decoded" if images is not None and images.is_dir() else "is not a folder"
        raise ImportRefusedError(f"{images}: {what}; name another folder, or none")
    job = ImportJob(kind, target.classes or (), target.input_size, target.out, expert, form, images is not None)
    tensors, weights = plain_tensors(file), target.out / f"{expert}.safetensors"
    is_new = not weights.exists()
    try:
        if tensors is None:
            _refuse_pickle(file, kind, trust=trust)
            report = _import_pickle(file, job, pictures)
        elif target.classes is None:
            raise ImportRefusedError(f"{file}: holds weights without class names; give them in order with --classes")
        else:
            report = _import_original(_load_original(kind, tensors, len(target.classes)), job, pictures)
        add_expert(target.out / "catalog.yaml", expert, report.entry)
    except OSError as error:
        if is_new:
            weights.unlink(missing_ok=True)
        remedy = "correct that, or name another folder with --out"
        raise ImportRefusedError(f"cannot write to {target.out}: {error.strerror or error}; {remedy}") from error
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
    `YOLO(...).model`. Writes no catalog: the report has the entry. Raises ImportRefusedError.
    """
    kind = known_architecture(architecture)
    form = form or Form()
    check_request(kind, input_size, expert, form, has_pictures=images is not None)
    job = ImportJob(kind, tuple(classes), input_size, out, expert, form, images is not None)
    return _import_original(copy.deepcopy(original), job, images if images is not None else pattern_images())


def _import_original(original: nn.Module, job: ImportJob, images: Sequence[Image]) -> ImportReport:
    model = original.float().eval()
    normalisation = NORMALISATIONS[job.architecture.normalisation]
    outputs = original_outputs(model, squares(images, job.architecture.task, job.input_size), normalisation)
    return make_expert(job, model, images, outputs)


def _import_pickle(file: Path, job: ImportJob, images: Sequence[Image]) -> ImportReport:
    """Load the other process' weights into a model of ours, proved against the pickled model's answers there."""
    try:
        unpickled = unpickle_elsewhere(file, squares(images, "detect", job.input_size))
    except ValueError as error:
        raise ImportRefusedError(f"{file}: {error}") from error
    count, names = len(unpickled.classes), ", ".join(unpickled.classes)
    if len(job.classes) not in (0, count):
        raise ImportRefusedError(f"{job.expert}: the model has {count} classes ({names}), not {len(job.classes)}")
    original = _load_original(job.architecture, unpickled.state_dict, count)
    select_head(original, end_to_end=unpickled.end_to_end)
    job = replace(job, classes=job.classes or unpickled.classes)
    return make_expert(job, original.float().eval(), images, unpickled.outputs)


def _refuse_pickle(file: Path, kind: Architecture, *, trust: bool) -> None:
    if not trust:
        raise ImportRefusedError(
            f"{file}: is a pickled program, not plain weights: opening it runs whatever its author put in. "
            "If you trust where it comes from, add --trust (it is then opened in a process of its own)"
        )
    if kind.task == "classify":
        raise ImportRefusedError(f"{file}: holds a pickled {kind.name}; save its state_dict() and import that file")


def plain_tensors(file: Path) -> dict[str, torch.Tensor] | None:
    """Return the state_dict of a file that holds nothing but tensors, None if it is a pickled program."""
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ImportRefusedError(f"{file}: there is no such file") from error
    except pickle.UnpicklingError:
        return None
    except Exception as error:  # the restricted unpickler lets through whatever damaged bytes cause
        raise ImportRefusedError(f"{file}: is damaged, or not written by torch.save ({error})") from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ImportRefusedError(f"{file}: holds no state_dict; save `model.state_dict()` with torch.save")
    return {str(key).removeprefix("module."): value for key, value in content.items()}


def _load_original(kind: Architecture, state_dict: Mapping[str, torch.Tensor], class_count: int) -> nn.Module:
    original = build_original(kind, class_count)
    try:
        original.load_state_dict(dict(state_dict), strict=True)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:4]]
        message = f"the weights are not those of a {kind.name} with {class_count} classes"
        raise ImportRefusedError(f"{message}: {' '.join(lines)[:600]}") from error
    return original
