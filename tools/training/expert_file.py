"""Writes an expert's file from a framework's model: folded, stored as a slot's bytes, proved, then put in its place."""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from experts.catalog import CatalogFile, read_catalog, resolve, write_catalog
from experts.editions.folder import EditionFolder
from experts.editions.history import keep_candidates
from experts.spec import ExpertId, ExpertSpec
from experts.stored import thinned
from experts.vision.architectures import (
    CHANNELS_LAST,
    END_TO_END_HEAD,
    NORMALISATIONS,
    PLAIN_HEAD,
    YOLO_STRIDE_PIXELS,
    Architecture,
    layout_id,
)
from experts.vision.layouts import build_layout, pack
from experts.vision.networks import adapt, is_end_to_end
from experts.weights import FILE_DTYPES, ITEM_BYTES, write_weights
from tools.training import TrainingError, require_expert_id
from tools.training.proof import Agreement, Image, OriginalOutputs, batch_ms, compare, why_unfit

#: In place of a dtype: the fastest on this machine that agrees with the original.
AUTO = "auto"
AUTO_DTYPES = ("float32", "bfloat16", "float16")
#: Forms of a file, thinnest first. A file is never wider than the slot that it fills.
STORES = ("int8", "bfloat16", "float32")
#: Largest difference of a confidence, and of a box in pixels, between an expert and its original. Eight bits of
#: mantissa round more; the report shows what that does to verdicts.
CONFIDENCE_TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.03, "float16": 5e-3, "int8": 0.05}
BOX_TOLERANCES_PIXELS: Mapping[str, float] = {"float32": 0.5, "bfloat16": 2.0, "float16": 0.5, "thin": 8.0}
#: `--store auto` takes a classifier's thin form by its share of equal labels and the largest difference of confidence,
#: a detector's by the mean average precision that its boxes lose, with the original's boxes as the truth.
_SAME_LABELS, _NEAR_CONFIDENCE, _LOST_PRECISION = 0.999, 0.01, 0.005


def make_in(out: Path, expert: str, source: Path, make: Callable[[Path], Any]) -> tuple[Any, str | None]:
    """Make an expert in `out`; return its report, whose `file` are its weights, and its version if it is a candidate.

    If the edition in force has that expert, the new one becomes a candidate and the working catalog stays as it is.
    Raises EditionError, and CatalogError before anything is made.
    """
    folder = EditionFolder(out / "catalog.yaml")
    present = read_catalog(folder.catalog)
    in_force = folder.in_force()
    if in_force is None or expert not in in_force.experts:
        return make(out), None
    with _scratch(out) as scratch:
        catalog = Path(scratch) / "catalog.yaml"
        write_catalog(catalog, {name: each.moved_from(out) for name, each in present.items()})
        report = make(catalog.parent)
        entry = read_catalog(catalog)[expert].moved_from(catalog.parent)
        version = keep_candidates(folder, {expert: entry}, str(source.resolve()))[expert]
        return replace(report, file=folder.weights.place(entry.sha256)), version


def _scratch(out: Path) -> TemporaryDirectory[str]:
    """Make a temporary folder in `out`, and remove what killed processes left there."""
    out.mkdir(parents=True, exist_ok=True)
    for left in (each for each in out.glob(".new-*") if not Path("/proc", each.name.split("-")[1]).exists()):
        shutil.rmtree(left, ignore_errors=True)
    return TemporaryDirectory(prefix=f".new-{os.getpid()}-", dir=out)


@dataclass(frozen=True, slots=True)
class FormTrial:
    """A form that was tried: bytes that a load reads, milliseconds of a batch of four here (0: not timed)."""

    dtype: str
    stored_as: str
    bytes: int
    agreement: Agreement
    agrees: bool
    batch_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The expert that was written. `entry` is the catalog's entry, its `file` relative to the catalog's folder.

    With `--dtype auto`, `trials` has every dtype that was tried, and `unfit` why others were not; with `--store auto`,
    `thin` has the thin forms that were tried. `notes` say what was taken of several, and how well labelled images fit.
    """

    expert: str
    file: Path
    entry: dict[str, Any]
    spec: ExpertSpec
    agreement: Agreement
    dtype: str
    trials: tuple[FormTrial, ...] = ()
    unfit: tuple[str, ...] = ()
    thin: tuple[FormTrial, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Form:
    """Form in which an expert is computed, stored and proved.

    `tolerance` is of confidences: None for that of the dtype, infinity to accept any answer (benchmarks). `origin`
    goes into the results table.
    """

    dtype: str = "float32"
    tolerance: float | None = None
    origin: str = "imported"
    store: str = "float32"


@dataclass(frozen=True, slots=True)
class ImportJob:
    """The expert to write, independent of the kind of file that the network comes from."""

    architecture: Architecture
    classes: tuple[str, ...]
    input_size: int
    out: Path
    expert: str
    form: Form
    has_pictures: bool

    def __post_init__(self) -> None:
        """Refuse what cannot become an expert, before any model runs. Raises TrainingError."""
        if self.form.store == AUTO and not self.has_pictures:
            raise TrainingError(
                "--store auto compares answers on pictures of the line: name a folder of them with --images, or a form"
            )
        require_expert_id(self.expert)
        if not 32 <= self.input_size <= 4096:
            raise TrainingError(f"--input-size {self.input_size} is not between 32 and 4096 pixels")
        if self.architecture.task == "detect" and self.input_size % YOLO_STRIDE_PIXELS:
            raise TrainingError(f"--input-size {self.input_size} is not a multiple of {YOLO_STRIDE_PIXELS}")


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A way to store the expert: written under another name, and compared with the original."""

    dtype: str
    spec: ExpertSpec
    agreement: Agreement

    @property
    def form(self) -> str:
        """Return the form, of file and slot, that rounds most."""
        return self.spec.stored_as or self.dtype

    def limits(self, tolerance: float | None) -> tuple[float, float]:
        """Return the largest differences of a confidence and of a box that are accepted."""
        boxes = BOX_TOLERANCES_PIXELS["thin" if self.spec.stored_as else self.dtype]
        return CONFIDENCE_TOLERANCES[self.form] if tolerance is None else tolerance, boxes

    def agrees(self, tolerance: float | None) -> bool:
        confidence, box_pixels = self.limits(tolerance)
        is_near = self.agreement.confidence <= confidence and self.agreement.box_pixels <= box_pixels
        return tolerance == math.inf or is_near

    def trial(self, **found: Any) -> FormTrial:
        return FormTrial(self.dtype, self.spec.stored_as, self.spec.read_bytes, self.agreement, **found)

    def agrees_nearly(self) -> bool:
        """Return True if `--store auto` may take it."""
        agreement = self.agreement
        if agreement.mean_precision is not None:
            return agreement.mean_precision >= 1 - _LOST_PRECISION
        same_labels = agreement.same_labels >= _SAME_LABELS * agreement.images
        return same_labels and agreement.confidence <= _NEAR_CONFIDENCE


def make_expert(job: ImportJob, original: nn.Module, images: Sequence[Image], outputs: OriginalOutputs) -> ImportReport:
    """Fold, pack, write under another name, prove, and only then put the file in its place."""
    file = job.out / f"{job.expert}.safetensors"
    try:
        adapted = adapt(job.architecture, original, job.input_size)
    except ValueError as error:
        raise TrainingError(f"{job.expert}: {error}") from error
    dtypes = AUTO_DTYPES if job.form.dtype == AUTO else (job.form.dtype,)
    unfit = {dtype: reason for dtype in dtypes if (reason := why_unfit(adapted, dtype)) is not None}
    if len(unfit) == len(dtypes):
        raise TrainingError(f"{job.expert}: {unfit[dtypes[0]]}")
    head = END_TO_END_HEAD if is_end_to_end(original) else PLAIN_HEAD
    thin: list[FormTrial] = []
    store = STORES[-1] if job.form.store == AUTO else job.form.store
    with _scratch(job.out) as scratch:

        def candidate(dtype: str, store: str) -> _Candidate:
            place = Path(scratch) / f"{dtype}.{store}"
            spec = _write(job, place, adapted, dtype, _thinner(store, dtype), head)
            return _Candidate(dtype, spec, compare(spec, images, outputs))

        candidates = [candidate(dtype, store) for dtype in dtypes if dtype not in unfit]
        trials = _try_speeds(job, candidates, images) if job.form.dtype == AUTO else ()
        times = [(trial.batch_ms, number) for number, trial in enumerate(trials) if trial.agrees]
        best = candidates[min(times)[1] if times else 0]
        _refuse_disagreement(job, best)
        for store in (store for store in STORES if job.form.store == AUTO and _thinner(store, best.dtype)):
            tried = candidate(best.dtype, store)
            agrees = tried.agrees_nearly()
            thin.append(tried.trial(agrees=agrees))
            if agrees:
                best = tried
                break
        best.spec.file.replace(file)
    entry = entry_of(job.architecture, job.classes, job.input_size, file, best.spec.sha256)
    if best.spec.stored_as:
        figures = {"form": best.spec.stored_as, "bytes": best.spec.stored_bytes, "slot_bytes": best.spec.weights_bytes}
        entry["stored"] = figures | {"on": "pictures" if job.has_pictures else "patterns"} | asdict(best.agreement)
    spec, reasons = replace(best.spec, file=file), tuple(unfit.values())
    return ImportReport(job.expert, file, entry, spec, best.agreement, best.dtype, trials, reasons, tuple(thin))


def _thinner(store: str, dtype: str) -> str:
    """Return the stored form `store`, or "" if it is not thinner than the slot's dtype."""
    return store if ITEM_BYTES[FILE_DTYPES[store]] < ITEM_BYTES[FILE_DTYPES[dtype]] else ""


def _write(job: ImportJob, place: Path, adapted: nn.Module, dtype: str, stored_as: str, head: str) -> ExpertSpec:
    """Write the network's bytes and their header to `place`, and return them as an expert."""
    layout = layout_id(job.architecture, len(job.classes), job.input_size, dtype, CHANNELS_LAST, head)
    try:
        built = build_layout(layout)
        blocks = pack(built, adapted)
    except ValueError as error:
        raise TrainingError(f"{job.expert}: {error}") from error
    metadata = header_of(job.architecture, job.classes, job.input_size, (dtype, CHANNELS_LAST, head), job.form.origin)
    if stored_as:
        blocks, metadata["stored"] = thinned(blocks, built.form(stored_as)), stored_as
    sha256 = write_weights(place, blocks, metadata)
    entry = entry_of(job.architecture, job.classes, job.input_size, place, sha256)
    return spec_of_entry(place.parent, job.expert, entry)


def header_of(
    architecture: Architecture, classes: Sequence[str], input_size: int, form: tuple[str, str, str], origin: str
) -> dict[str, str]:
    """Return the header of a weights file; `form` is its dtype, memory format and head."""
    dtype, memory_format, head = form
    return {
        "architecture": architecture.name,
        "classes": json.dumps(list(classes)),
        "input_size": str(input_size),
        "normalisation": json.dumps(normalisation_of(architecture)).strip('"'),
        "dtype": dtype,
        "memory_format": memory_format,
        "head": head,
        "layout": layout_id(architecture, len(classes), input_size, *form),
        "origin": origin,
    }


def entry_of(
    architecture: Architecture, classes: Sequence[str], input_size: int, file: Path, sha256: str
) -> dict[str, Any]:
    """Return the entry of a weights file that lies beside the catalog."""
    return {
        "architecture": architecture.name,
        "file": file.name,
        "classes": list(classes),
        "input_size": input_size,
        "normalisation": normalisation_of(architecture),
        "sha256": sha256,
    }


def normalisation_of(architecture: Architecture) -> str | dict[str, list[float]]:
    """Return a normalisation as catalogs have it: two have names."""
    mean, std = NORMALISATIONS[architecture.normalisation]
    return {"mean": [*mean], "std": [*std]} if architecture.normalisation == ".5" else architecture.normalisation


def spec_of_entry(out: Path, expert: str, entry: Mapping[str, Any]) -> ExpertSpec:
    """Return an entry of a catalog in `out` as a line reads it. Raises TrainingError for one that it refuses."""
    catalog, problems = resolve(CatalogFile.model_validate({"experts": {expert: entry}}), out)
    if problems:
        raise TrainingError(f"{expert}: {problems[0][1]}")
    return catalog[ExpertId(expert)]


def _try_speeds(job: ImportJob, candidates: Sequence[_Candidate], images: Sequence[Image]) -> tuple[FormTrial, ...]:
    """Time each dtype on this machine. A dtype that was not asked for must name the same label on every image."""
    milliseconds = batch_ms([candidate.spec for candidate in candidates], images)
    return tuple(
        each.trial(
            agrees=each.agrees(job.form.tolerance) and each.agreement.same_labels == each.agreement.images, batch_ms=ms
        )
        for each, ms in zip(candidates, milliseconds, strict=True)
    )


def _refuse_disagreement(job: ImportJob, candidate: _Candidate) -> None:
    if candidate.agrees(job.form.tolerance):
        return
    agreement = candidate.agreement
    confidence, box_pixels = candidate.limits(job.form.tolerance)
    raise TrainingError(
        f"{job.expert}: differs from the original by {agreement.confidence:.2g} in confidence and "
        f"{agreement.box_pixels:.2g} pixels in boxes on {agreement.images} images; at most {confidence:g} and "
        f"{box_pixels:g} are accepted" + ("; import it as float32" if candidate.form != "float32" else "")
    )
