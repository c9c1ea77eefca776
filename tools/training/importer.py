"""`coserve import`: a trained model file becomes an expert: folded, written as a slot's bytes, proved, catalogued.

Nothing here unpickles unknown classes. A file of plain tensors is read with `weights_only`; an ultralytics `.pt`, which
is a pickled program, is opened only on request and only in a process of its own (`tools/training/unpickle.py`).
"""

import copy
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experts.catalog import add_to_catalog
from experts.vision.architectures import NORMALISATIONS, Architecture
from experts.vision.networks import build_original, select_head
from tools.training.expert_file import (
    Form,
    ImportRefusedError,
    ImportReport,
    Job,
    check_request,
    known_architecture,
    make_expert,
)
from tools.training.proof import Image, Reference, image_folder, original_outputs, pattern_images, squares
from tools.training.unpickle import Unpickled, unpickle_elsewhere


@dataclass(frozen=True, slots=True)
class Target:
    """What a file shall become. None: the classes that an ultralytics `.pt` names, the file's name as the expert's id,
    `out/catalog.yaml` as the catalog.
    """

    architecture: str
    input_size: int
    out: Path
    classes: tuple[str, ...] | None = None
    expert: str | None = None
    catalog: Path | None = None
    form: Form | None = None


def import_file(file: Path, target: Target, *, images: Path | None = None, trust: bool = False) -> ImportReport:
    """The whole of `coserve import`: read FILE, make the expert, add it to the catalog.

    `images` is a folder to prove the agreement on (patterns without it). `trust` allows a pickled program to run in a
    process of its own. Raises ImportRefusedError, and then nothing is changed.
    """
    catalog = target.catalog or target.out / "catalog.yaml"
    expert = target.expert or file.stem
    form = target.form or Form(origin=f"imported from {file.name}")
    known = known_architecture(target.architecture)
    check_request(known, target.input_size, expert, form)
    pictures = image_folder(images) if images is not None else pattern_images()
    if not pictures:
        raise ImportRefusedError(f"{images}: holds no image that can be decoded; name another folder, or none")
    tensors = _plain_tensors(file)
    if tensors is None:
        _refuse_pickle(file, known, trust=trust)
        unpickled = _unpickle(file, pictures, target.input_size)
        classes = target.classes or unpickled.classes
        report = _import_unpickled(
            unpickled, Job(known, classes, target.input_size, target.out, expert, form), pictures
        )
    elif target.classes is None:
        raise ImportRefusedError(f"{file}: holds weights without class names; give them in order with --classes")
    else:
        original = _load_original(known, tensors, len(target.classes))
        report = import_model(
            original,
            known.name,
            target.classes,
            target.input_size,
            target.out,
            expert=expert,
            images=pictures,
            form=form,
        )
    entry = {**report.entry, "file": os.path.relpath(report.file, catalog.parent)}
    add_to_catalog(catalog, expert, entry)
    return replace(report, entry=entry)


def _refuse_pickle(file: Path, known: Architecture, *, trust: bool) -> None:
    if not trust:
        raise ImportRefusedError(
            f"{file}: is a pickled program, not plain weights: opening it runs whatever its author put in. "
            "If you trust where it comes from, add --trust (it is then opened in a process of its own)"
        )
    if known.task == "classify":
        raise ImportRefusedError(f"{file}: holds a pickled {known.name}; save its state_dict() and import that file")


def import_classifier(
    state_dict: Mapping[str, torch.Tensor],
    architecture: str,
    classes: Sequence[str],
    input_size: int,
    out: Path,
    *,
    expert: str,
    images: Sequence[Image] | None = None,
    form: Form | None = None,
) -> ImportReport:
    """A torchvision ResNet's state_dict as `out/EXPERT.safetensors`. Writes no catalog: the report has the entry."""
    known = known_architecture(architecture)
    original = _load_original(known, state_dict, len(classes))
    return import_model(original, architecture, classes, input_size, out, expert=expert, images=images, form=form)


def import_detector(
    model: nn.Module,
    architecture: str,
    input_size: int,
    out: Path,
    *,
    expert: str,
    classes: Sequence[str] | None = None,
    images: Sequence[Image] | None = None,
    form: Form | None = None,
) -> ImportReport:
    """An ultralytics DetectionModel of this process (as `YOLO(...).model`) as `out/EXPERT.safetensors`."""
    names: dict[int, str] = getattr(model, "names", {})
    labels = tuple(classes) if classes is not None else tuple(names[index] for index in sorted(names))
    return import_model(model, architecture, labels, input_size, out, expert=expert, images=images, form=form)


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
    """A framework's own model of this process, with batch norms, as an expert proved against it."""
    known = known_architecture(architecture)
    form = form or Form()
    check_request(known, input_size, expert, form)
    pictures = images if images is not None else pattern_images()
    model = copy.deepcopy(original).float().eval()
    normalisation = NORMALISATIONS[form.normalisation or known.normalisation]
    reference = original_outputs(model, squares(pictures, known.task, input_size), normalisation)
    return make_expert(Job(known, tuple(classes), input_size, out, expert, form), model, pictures, reference)


def _plain_tensors(file: Path) -> dict[str, torch.Tensor] | None:
    """The state_dict in a file that holds nothing but tensors, or None where it is a pickled program."""
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ImportRefusedError(f"{file}: there is no such file") from error
    except pickle.UnpicklingError:
        return None
    except Exception as error:  # the restricted unpickler lets through whatever damaged bytes cause
        raise ImportRefusedError(f"{file}: is damaged, or no file that torch.save wrote ({error})") from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ImportRefusedError(f"{file}: holds no state_dict; save `model.state_dict()` with torch.save")
    return {str(key).removeprefix("module."): value for key, value in content.items()}


def _load_original(known: Architecture, state_dict: Mapping[str, torch.Tensor], class_count: int) -> nn.Module:
    original = build_original(known, class_count)
    try:
        original.load_state_dict(dict(state_dict), strict=True)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:4]]
        message = f"the weights are not those of a {known.name} with {class_count} classes"
        raise ImportRefusedError(f"{message}: {' '.join(lines)[:600]}") from error
    return original


def _unpickle(file: Path, pictures: Sequence[Image], input_size: int) -> Unpickled:
    try:
        return unpickle_elsewhere(file, squares(pictures, "detect", input_size))
    except ValueError as error:
        raise ImportRefusedError(f"{file}: {error}") from error


def _import_unpickled(unpickled: Unpickled, job: Job, pictures: Sequence[Image]) -> ImportReport:
    """The weights of the other process in a model of ours, proved against what the pickled model answered there."""
    count = len(unpickled.classes)
    if len(job.classes) != count:
        names = ", ".join(unpickled.classes)
        raise ImportRefusedError(f"{job.expert}: the model has {count} classes ({names}), not {len(job.classes)}")
    original = _load_original(job.architecture, unpickled.state_dict, count)
    select_head(original, end_to_end=unpickled.end_to_end)
    return make_expert(job, original.float().eval(), pictures, Reference(unpickled.outputs))
