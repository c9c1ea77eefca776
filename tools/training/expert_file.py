"""An expert's file from a framework's model: folded, written as a slot's bytes, proved, and only then in its place."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

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
from experts.vision.networks import adapt, is_end_to_end
from experts.weights import read_header, write_weights
from tools.training.proof import Agreement, Image, Reference, batch_ms, compare, why_unfit

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
class Job:
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


def make_expert(job: Job, original: nn.Module, pictures: Sequence[Image], reference: Reference) -> ImportReport:
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
    job: Job,
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


def _choose(job: Job, found: Sequence[_Candidate], pictures: Sequence[Image]) -> tuple[tuple[Trial, ...], _Candidate]:
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


def check_request(known: Architecture, input_size: int, expert: str, form: Form) -> None:
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


def _agrees(job: Job, candidate: _Candidate) -> bool:
    agreement = candidate.agreement
    if job.form.tolerance == math.inf:
        return True
    tolerance = job.form.tolerance if job.form.tolerance is not None else CONFIDENCE_TOLERANCES[candidate.dtype]
    return agreement.confidence <= tolerance and agreement.box_pixels <= BOX_TOLERANCES_PIXELS[candidate.dtype]


def _refuse_disagreement(job: Job, candidate: _Candidate) -> None:
    if _agrees(job, candidate):
        return
    agreement, dtype = candidate.agreement, candidate.dtype
    tolerance = job.form.tolerance if job.form.tolerance is not None else CONFIDENCE_TOLERANCES[dtype]
    raise ImportRefusedError(
        f"{job.expert}: differs from the original by {agreement.confidence:.2g} in confidence and "
        f"{agreement.box_pixels:.2g} pixels in boxes on {agreement.images} images; at most {tolerance:g} and "
        f"{BOX_TOLERANCES_PIXELS[dtype]:g} are accepted" + ("; import it as float32" if dtype != "float32" else "")
    )


def _spec(job: Job, file: Path, sha256: str, normalisation: tuple[Any, Any]) -> ExpertSpec:
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


def known_architecture(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        raise ImportRefusedError(f"unknown architecture {name!r}; known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
