"""`coserve import`: a trained model file becomes an expert: folded, written as a slot's bytes, proved, catalogued.

Nothing here unpickles unknown classes. A file of plain tensors is read with `weights_only`; an ultralytics `.pt`, which
is a pickled program, is opened only on request and only in a process of its own (`tools/unpickle.py`).
"""

import copy
import json
import math
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experts.catalog import add_to_catalog
from experts.spec import ExpertId, ExpertSpec, LayoutId
from experts.vision.architectures import (
    ARCHITECTURES,
    DTYPES,
    END_TO_END_HEAD,
    MEMORY_FORMATS,
    NORMALISATIONS,
    PLAIN_HEAD,
    YOLO_STRIDE_PIXELS,
    Architecture,
    layout_id,
)
from experts.vision.layouts import build_layout, pack
from experts.vision.networks import adapt, build_original, is_end_to_end, select_head
from experts.weights import read_header, write_weights
from tools.proof import (
    Agreement,
    Image,
    Reference,
    batch_ms,
    compare,
    image_folder,
    original_outputs,
    pattern_images,
    squares,
    why_unfit,
)
from tools.unpickle import Unpickled, unpickle_elsewhere

#: Instead of a dtype: the fastest on this machine that agrees with the original.
AUTO = "auto"
AUTO_DTYPES = ("float32", "bfloat16", "float16")
#: Largest difference of a confidence, and of a box in pixels, between an expert and its original. Eight bits of
#: mantissa round more; what that does to verdicts is shown.
CONFIDENCE_TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.03, "float16": 5e-3}
BOX_TOLERANCES_PIXELS: Mapping[str, float] = {"float32": 0.5, "bfloat16": 2.0, "float16": 0.5}


class ImportRefusedError(Exception):
    """The model file cannot become an expert; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One dtype tried: milliseconds of a batch of four on this machine, and whether its answers are near enough."""

    dtype: str
    batch_ms: float
    agreement: Agreement
    agrees: bool


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was made. `entry` is the catalog's entry, its `file` relative to the catalog's folder.

    Where the choice was ours, `trials` has every dtype that was tried, and `unfit` why others were not.
    """

    expert: str
    file: Path
    entry: dict[str, Any]
    spec: ExpertSpec
    agreement: Agreement
    dtype: str
    trials: tuple[Trial, ...] = ()
    unfit: tuple[str, ...] = ()

    @property
    def weights_bytes(self) -> int:
        return self.spec.weights_bytes

    @property
    def layout(self) -> str:
        return self.spec.layout


@dataclass(frozen=True, slots=True)
class Form:
    """How an expert is stored and proved. `tolerance` is of confidences, None meaning that of the dtype, infinity that
    no answer is refused (benchmarks). `origin` goes into the results table.
    """

    dtype: str = "float32"
    memory_format: str = "channels_last"
    tolerance: float | None = None
    normalisation: str | None = None
    origin: str = "imported"


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
    known = _architecture(target.architecture)
    _check_request(known, target.input_size, expert, form)
    pictures = image_folder(images) if images is not None else pattern_images()
    if not pictures:
        raise ImportRefusedError(f"{images}: holds no image that can be decoded; name another folder, or none")
    tensors = _plain_tensors(file)
    if tensors is None:
        _refuse_pickle(file, known, trust=trust)
        unpickled = _unpickle(file, pictures, target.input_size)
        classes = target.classes or unpickled.classes
        report = _import_unpickled(
            unpickled, _Job(known, classes, target.input_size, target.out, expert, form), pictures
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
    known = _architecture(architecture)
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
    known = _architecture(architecture)
    form = form or Form()
    _check_request(known, input_size, expert, form)
    pictures = images if images is not None else pattern_images()
    model = copy.deepcopy(original).float().eval()
    normalisation = NORMALISATIONS[form.normalisation or known.normalisation]
    reference = original_outputs(model, squares(pictures, known.task, input_size), normalisation)
    return _make(_Job(known, tuple(classes), input_size, out, expert, form), model, pictures, reference)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be made, whatever it is made from."""

    architecture: Architecture
    classes: tuple[str, ...]
    input_size: int
    out: Path
    expert: str
    form: Form


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One way to store the expert: written under another name, and compared with the original."""

    dtype: str
    spec: ExpertSpec
    metadata: Mapping[str, str]
    agreement: Agreement


def _make(job: _Job, original: nn.Module, pictures: Sequence[Image], reference: Reference) -> ImportReport:
    """Fold, pack, write under another name, prove, and only then put the file in its place."""
    file = job.out / f"{job.expert}.safetensors"
    try:
        adapted = adapt(job.architecture, original, job.input_size)
    except ValueError as error:
        raise ImportRefusedError(f"{job.expert}: {error}") from error
    dtypes = AUTO_DTYPES if job.form.dtype == AUTO else (job.form.dtype,)
    unfit = {dtype: reason for dtype in dtypes if (reason := why_unfit(adapted, dtype)) is not None}
    if len(unfit) == len(dtypes):
        raise ImportRefusedError(f"{job.expert}: {unfit[dtypes[0]]}")
    places = {
        dtype: job.out / f".{job.expert}.{os.getpid()}.{dtype}.candidate" for dtype in dtypes if dtype not in unfit
    }
    head = END_TO_END_HEAD if is_end_to_end(original) else PLAIN_HEAD
    try:
        found = [_candidate(job, dtype, place, head, adapted, pictures, reference) for dtype, place in places.items()]
        trials, kept = _choose(job, found, pictures)
        _refuse_disagreement(job, kept)
        kept.spec.file.replace(file)
    finally:
        for place in places.values():
            place.unlink(missing_ok=True)
    entry = {
        "architecture": job.architecture.name,
        "file": file.name,
        "classes": list(job.classes),
        "input_size": job.input_size,
        "normalisation": kept.metadata["normalisation"],
        "sha256": kept.spec.sha256,
    }
    spec = replace(kept.spec, file=file)
    return ImportReport(job.expert, file, entry, spec, kept.agreement, kept.dtype, trials, tuple(unfit.values()))


def _candidate(
    job: _Job,
    dtype: str,
    place: Path,
    head: str,
    adapted: nn.Module,
    pictures: Sequence[Image],
    reference: Reference,
) -> _Candidate:
    layout_name = layout_id(job.architecture, len(job.classes), job.input_size, dtype, job.form.memory_format, head)
    try:
        blocks = pack(build_layout(layout_name), adapted)
    except ValueError as error:
        raise ImportRefusedError(f"{job.expert}: {error}") from error
    normalisation = job.form.normalisation or job.architecture.normalisation
    metadata = {
        "architecture": job.architecture.name,
        "classes": json.dumps(list(job.classes)),
        "input_size": str(job.input_size),
        "normalisation": normalisation,
        "dtype": dtype,
        "memory_format": job.form.memory_format,
        "head": head,
        "layout": layout_name,
        "origin": job.form.origin,
    }
    sha256 = write_weights(place, blocks, metadata)
    spec = _spec(job, place, sha256, NORMALISATIONS[normalisation])
    return _Candidate(dtype, spec, metadata, compare(spec, pictures, reference))


def _choose(job: _Job, found: Sequence[_Candidate], pictures: Sequence[Image]) -> tuple[tuple[Trial, ...], _Candidate]:
    """The fastest on this machine of those that agree with the original, labels on every image included.

    The first where the choice was not ours, or where none agrees.
    """
    if job.form.dtype != AUTO:
        return (), found[0]
    milliseconds = batch_ms([candidate.spec for candidate in found], pictures)
    trials = tuple(
        Trial(candidate.dtype, ms, candidate.agreement, _agrees(job, candidate) and candidate.agreement.labels_agree)
        for candidate, ms in zip(found, milliseconds, strict=True)
    )
    fit = [(trial.batch_ms, number) for number, trial in enumerate(trials) if trial.agrees]
    return trials, found[min(fit)[1] if fit else 0]


def _check_request(known: Architecture, input_size: int, expert: str, form: Form) -> None:
    """Before any model is run."""
    if form.dtype not in (*DTYPES, AUTO) or form.memory_format not in MEMORY_FORMATS:
        known_forms = f"dtypes {', '.join((*DTYPES, AUTO))}; memory formats {', '.join(MEMORY_FORMATS)}"
        raise ImportRefusedError(
            f"{form.dtype} {form.memory_format} is no way to store weights; known are {known_forms}"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", expert):
        raise ImportRefusedError(f"{expert!r} is no expert id; use letters, digits and . _ : -")
    if not 32 <= input_size <= 4096:
        raise ImportRefusedError(f"--input-size {input_size} is not between 32 and 4096 pixels")
    if known.task == "detect" and input_size % YOLO_STRIDE_PIXELS:
        raise ImportRefusedError(f"--input-size {input_size} is not a multiple of {YOLO_STRIDE_PIXELS}")


def _agrees(job: _Job, candidate: _Candidate) -> bool:
    agreement = candidate.agreement
    if job.form.tolerance == math.inf:
        return True
    tolerance = job.form.tolerance if job.form.tolerance is not None else CONFIDENCE_TOLERANCES[candidate.dtype]
    return agreement.confidence <= tolerance and agreement.box_pixels <= BOX_TOLERANCES_PIXELS[candidate.dtype]


def _refuse_disagreement(job: _Job, candidate: _Candidate) -> None:
    if _agrees(job, candidate):
        return
    agreement, dtype = candidate.agreement, candidate.dtype
    tolerance = job.form.tolerance if job.form.tolerance is not None else CONFIDENCE_TOLERANCES[dtype]
    raise ImportRefusedError(
        f"{job.expert}: differs from the original by {agreement.confidence:.2g} in confidence and "
        f"{agreement.box_pixels:.2g} pixels in boxes on {agreement.images} images; at most {tolerance:g} and "
        f"{BOX_TOLERANCES_PIXELS[dtype]:g} are accepted" + ("; import it as float32" if dtype != "float32" else "")
    )


def _spec(job: _Job, file: Path, sha256: str, normalisation: tuple[Any, Any]) -> ExpertSpec:
    header = read_header(file)
    mean, std = normalisation
    return ExpertSpec(
        expert=ExpertId(job.expert),
        architecture=job.architecture.name,
        task=job.architecture.task,
        file=file,
        classes=job.classes,
        input_size=job.input_size,
        mean=mean,
        std=std,
        sha256=sha256,
        layout=LayoutId(header.metadata["layout"]),
        weights_bytes=header.region_bytes,
    )


def _architecture(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        raise ImportRefusedError(f"unknown architecture {name!r}; known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


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


def _import_unpickled(unpickled: Unpickled, job: _Job, pictures: Sequence[Image]) -> ImportReport:
    """The weights of the other process in a model of ours, proved against what the pickled model answered there."""
    count = len(unpickled.classes)
    if len(job.classes) != count:
        names = ", ".join(unpickled.classes)
        raise ImportRefusedError(f"{job.expert}: the model has {count} classes ({names}), not {len(job.classes)}")
    original = _load_original(job.architecture, unpickled.state_dict, count)
    select_head(original, end_to_end=unpickled.end_to_end)
    return _make(job, original.float().eval(), pictures, Reference(unpickled.outputs))
