"""Makes an expert of a trained network: from a file (`coserve import`) or from a framework's model of this process.

Nothing here unpickles unknown classes. A file of plain tensors is read with `weights_only`; an ultralytics `.pt`, which
is a pickled program, is opened only on request and only in a process of its own (`tools/training/unpickle.py`).
"""

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experts.catalog import add_expert
from experts.vision.architectures import NORMALISATIONS, Architecture
from experts.vision.guards import learn_limits
from experts.vision.networks import build_original, select_head
from experts.vision.preprocess import to_square
from tools.experts.measure import SAMPLES, images_below
from tools.training import TrainingError, architecture_of
from tools.training.expert_file import (
    Form,
    ImportJob,
    ImportReport,
    make_expert,
)
from tools.training.proof import Image, original_outputs, pattern_images, squares
from tools.training.unpickle import unpickle_elsewhere

#: Pictures on which a thin file's answers are compared with the original's.
_CALIBRATION_SAMPLES = 200


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
    trust: bool = False,
) -> ImportReport:
    """Read `file`, make the expert, named as the file without `expert`, and add it to the catalog of `out`.

    An ultralytics `.pt` names its `classes` itself. The agreement is proved on the folder `images`, or on patterns.
    `trust` allows a pickled program to run in a process of its own. Raises TrainingError, and then nothing is changed.
    """
    form = form or Form(origin=f"imported from {file.name}")
    kind, has_pictures = architecture_of(architecture, "classify", "detect"), images is not None
    job = ImportJob(kind, tuple(classes), input_size, out, expert or file.stem, form, has_pictures)
    pictures = pattern_images()
    if images is not None:
        files = images_below(images, SAMPLES if form.store == "float32" else _CALIBRATION_SAMPLES)
        pictures = [to_square(image, kind.task, input_size) for _, image in files]
    if not pictures:
        what = "holds no image that can be decoded" if images is not None and images.is_dir() else "is not a folder"
        raise TrainingError(f"{images}: {what}; name another folder, or none")
    tensors, weights = plain_tensors(file), out / f"{job.expert}.safetensors"
    is_new = not weights.exists()
    try:
        if tensors is None:
            _refuse_pickle(file, kind, trust=trust)
            report = _import_pickle(file, job, pictures)
        elif not classes:
            raise TrainingError(f"{file}: holds weights without class names; give them in order with --classes")
        else:
            report = _import_original(_load_original(kind, tensors, len(classes)), job, pictures)
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
    normalisation = NORMALISATIONS[job.architecture.normalisation]
    outputs = original_outputs(model, squares(images, job.architecture.task, job.input_size), normalisation)
    return make_expert(job, model, images, outputs)


def _import_pickle(file: Path, job: ImportJob, images: Sequence[Image]) -> ImportReport:
    """Load the other process' weights into a model of ours, proved against the pickled model's answers there."""
    try:
        unpickled = unpickle_elsewhere(file, squares(images, "detect", job.input_size))
    except ValueError as error:
        raise TrainingError(f"{file}: {error}") from error
    count, names = len(unpickled.classes), ", ".join(unpickled.classes)
    if len(job.classes) not in (0, count):
        raise TrainingError(f"{job.expert}: the model has {count} classes ({names}), not {len(job.classes)}")
    original = _load_original(job.architecture, unpickled.state_dict, count)
    select_head(original, end_to_end=unpickled.end_to_end)
    job = replace(job, classes=job.classes or unpickled.classes)
    return make_expert(job, original.float().eval(), images, unpickled.outputs)


def _refuse_pickle(file: Path, kind: Architecture, *, trust: bool) -> None:
    if not trust:
        raise TrainingError(
            f"{file}: is a pickled program, not plain weights: opening it runs whatever its author put in. "
            "If you trust where it comes from, add --trust (it is then opened in a process of its own)"
        )
    if kind.task == "classify":
        raise TrainingError(f"{file}: holds a pickled {kind.name}; save its state_dict() and import that file")


def plain_tensors(file: Path) -> dict[str, torch.Tensor] | None:
    """Return the state_dict of a file that holds nothing but tensors, None if it is a pickled program."""
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise TrainingError(f"{file}: there is no such file") from error
    except pickle.UnpicklingError:
        return None
    except Exception as error:  # the restricted unpickler lets through whatever damaged bytes cause
        raise TrainingError(f"{file}: is damaged, or not written by torch.save ({error})") from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise TrainingError(f"{file}: holds no state_dict; save `model.state_dict()` with torch.save")
    return {str(key).removeprefix("module."): value for key, value in content.items()}


def _load_original(kind: Architecture, state_dict: Mapping[str, torch.Tensor], class_count: int) -> nn.Module:
    original = build_original(kind, class_count)
    try:
        original.load_state_dict(dict(state_dict), strict=True)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:4]]
        message = f"the weights are not those of a {kind.name} with {class_count} classes"
        raise TrainingError(f"{message}: {' '.join(lines)[:600]}") from error
    return original
