"""`coserve train deeppcb`: from the data set's folder to a line that runs, and a report of how good it is.

Minutes are shared out: most for the detector (it says what is wrong and where), a tenth for the catch-all classifier,
the rest for the patterns' own, which begin from it. A tenth of the training pairs is held out from all of it and
chooses thresholds; `val.txt` is read for the report only.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experts.catalog import CatalogFile, add_to_catalog, resolve, write_catalog
from experts.spec import ExpertId
from experts.vision.architectures import ARCHITECTURES
from experts.vision.networks import build_original
from tools.deeppcb import classifiers
from tools.deeppcb.classifiers import Locator, as_resnet, choose_evidence, evidence_of
from tools.deeppcb.crops import CropSampler
from tools.deeppcb.line import ANY_PATTERN, CLEAN, DETECTOR, SUSPECT, write_line
from tools.deeppcb.measure import choose_threshold
from tools.deeppcb.report import LineReport, measure_line
from tools.deeppcb.synthetic import Shapes, mine_shapes
from tools.deeppcb.tiles import LABELS, DataError, Pair, patterns_of, read_split
from tools.experts.measure import MeasuredAnswers
from tools.training.detector import find_boxes
from tools.training.detector_loop import Effort, fit_detector, limited_threads
from tools.training.expert_file import Form
from tools.training.importer import import_classifier, import_detector

ARCHITECTURE = "yolov8n"
#: Trained on windows of this many pixels, run on whole tiles.
_WINDOW_PIXELS, _TILE_PIXELS = 256, 640
_DETECTOR_SHARE, _SHARED_SHARE = 0.86, 0.09
_HELD_OUT_SHARE, _SPLIT_SEED = 0.1, 1
_ORIGIN = "trained on DeepPCB (S. Tang and others, MIT licence)"

#: What is being trained ("detector", "any-pattern", a pattern), and the share of it that is over.
OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished line: its configuration, what it is good for, and the minutes that each part took."""

    config: Path
    report: LineReport
    minutes: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Split:
    """`train` for training, `held_out` for thresholds, `val` for the report."""

    train: list[Pair]
    held_out: list[Pair]
    val: list[Pair]
    shapes: Shapes


def run(
    data: Path,
    out: Path,
    minutes: float = 85,
    *,
    detector: Path | None = None,
    threads: int = 2,
    seed: int = 0,
    on_progress: OnProgress = lambda _name, _share: None,
) -> Trained:
    """Train, write the line into `out`, and measure it; `out/report.json` keeps the figures.

    `detector` is a checkpoint of an earlier training (the file `out/detector.training` of one, finished or not): only
    the classifiers are trained then, in their part of the minutes. Raises DataError or TrainingError.
    """
    split = _read(data)
    model = None if detector is None else load_detector(detector)
    experts = out / "experts"
    experts.mkdir(parents=True, exist_ok=True)
    write_catalog(experts / "catalog.yaml", {})
    took: dict[str, float] = {}
    with limited_threads(threads):
        begin_s = time.perf_counter()
        if model is None:
            effort = Effort(minutes=minutes * _DETECTOR_SHARE, seed=seed, threads=threads)
            model = _train_detector(split, effort, out / "detector.training", on_progress)
        threshold = _add_detector(model, split, experts)
        took["detector"] = (time.perf_counter() - begin_s) / 60
        rest = minutes * (1 - _DETECTOR_SHARE - _SHARED_SHARE)
        patterns = patterns_of(split.train)
        took |= _train_classifiers(split, experts, minutes * _SHARED_SHARE, rest / len(patterns), seed, on_progress)
        config = write_line(out, patterns, threshold)
        answers = MeasuredAnswers()
        report = measure_line(config, split.val, threshold, answers.add)
        answers.write_confidences(experts / "catalog.yaml")
    trained = Trained(config, report, took)
    (out / "report.json").write_text(json.dumps({**asdict(report), "minutes": took}, indent=2) + "\n", encoding="utf-8")
    return trained


def _read(data: Path) -> _Split:
    pairs, val = read_split(data, "train"), read_split(data, "val")
    for pair in (*pairs, *val):
        if min(pair.test.shape) < _WINDOW_PIXELS:
            raise DataError(f"{pair.test_file}: is smaller than {_WINDOW_PIXELS} x {_WINDOW_PIXELS} pixels")
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(pairs))
    held = max(round(len(pairs) * _HELD_OUT_SHARE), 1)
    train = [pairs[index] for index in order[held:]]
    if not train:
        raise DataError(f"{data / 'train.txt'}: names {len(pairs)} pair; at least 2 are needed, some hundred for use")
    return _Split(train, [pairs[index] for index in order[:held]], val, mine_shapes(train))


def _train_detector(split: _Split, effort: Effort, checkpoint: Path, on_progress: OnProgress) -> nn.Module:
    """Much drawn at first; towards the end mostly what tiles are really like."""
    return fit_detector(
        CropSampler(split.train, split.shapes, _WINDOW_PIXELS),
        LABELS,
        ARCHITECTURE,
        _WINDOW_PIXELS,
        effort,
        closing=CropSampler(split.train, split.shapes, _WINDOW_PIXELS, drawn_defects=1.2, tested_share=0.9),
        checkpoint=checkpoint,
        on_progress=lambda progress: on_progress("detector", progress.share),
    )


def load_detector(file: Path) -> nn.Module:
    """The averaged weights of a checkpoint, in evaluation mode. Raises DataError."""
    model = build_original(ARCHITECTURES[ARCHITECTURE], len(LABELS))
    try:
        model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True)["model"])
    except Exception as error:  # the restricted unpickler lets through whatever damaged bytes cause
        raise DataError(f"{file}: holds no {ARCHITECTURE} of {len(LABELS)} classes ({error})") from error
    return model.eval()


def _add_detector(model: nn.Module, split: _Split, experts: Path) -> float:
    """Into the catalog; returns the confidence at which it is best on held-out pairs."""
    report = import_detector(
        model, ARCHITECTURE, _TILE_PIXELS, experts, expert=DETECTOR, classes=LABELS, form=Form(origin=_ORIGIN)
    )
    catalog, _ = resolve(CatalogFile.model_validate({"experts": {DETECTOR: report.entry}}), experts)
    found = find_boxes(catalog[ExpertId(DETECTOR)], [pair.test_file.read_bytes() for pair in split.held_out])
    threshold = choose_threshold(found, [pair.boxes for pair in split.held_out])
    # The rules have an operator look at boxes from half the threshold on; the expert must still answer those.
    entry: dict[str, Any] = {**report.entry, "confidence_floor": round(threshold / 2, 3)}
    add_to_catalog(experts / "catalog.yaml", DETECTOR, entry)
    return threshold


def _train_classifiers(
    split: _Split, experts: Path, shared_minutes: float, pattern_minutes: float, seed: int, on_progress: OnProgress
) -> dict[str, float]:
    took: dict[str, float] = {}
    begin_s = time.perf_counter()
    shared = classifiers.train_for_all(
        split.train, split.shapes, shared_minutes, seed, lambda share: on_progress(ANY_PATTERN, share)
    )
    _add_classifier(shared, ANY_PATTERN, split.held_out, experts)
    took[ANY_PATTERN] = (time.perf_counter() - begin_s) / 60
    begin_s = time.perf_counter()
    for pattern in patterns_of(split.train):
        mine, held_out = (
            [pair for pair in pairs if pair.pattern == pattern] for pairs in (split.train, split.held_out)
        )
        on_progress(pattern, 0.0)
        own = classifiers.train_for_pattern(shared, mine, split.shapes, pattern_minutes, seed)
        _add_classifier(own, pattern, held_out or mine, experts)
        on_progress(pattern, 1.0)
    took["patterns"] = (time.perf_counter() - begin_s) / 60
    return took


def _add_classifier(locator: Locator, expert: str, held_out: Sequence[Pair], experts: Path) -> None:
    """Its threshold is chosen on held-out pairs: their templates are clean, their tested tiles suspect."""
    clean = evidence_of(locator, [pair.template for pair in held_out])
    suspect = evidence_of(locator, [pair.test for pair in held_out])
    report = import_classifier(
        as_resnet(locator, choose_evidence(clean, suspect)),
        classifiers.ARCHITECTURE,
        (CLEAN, SUSPECT),
        classifiers.INPUT_SIZE,
        experts,
        expert=expert,
        form=Form(origin=_ORIGIN),
    )
    add_to_catalog(experts / "catalog.yaml", expert, report.entry)
