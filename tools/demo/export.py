"""Writes the demo's trained networks as int8 experts, fits heads on what the stored backbone gives, sets thresholds."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from daemon.line.line import load_catalog
from experts.catalog import Catalog, CatalogEntry, write_catalog
from experts.spec import Answer, ExpertId, PictureLimits
from experts.vision.guards import learn_limits
from experts.vision.heads import usual_distances
from experts.vision.infer import normalise
from experts.vision.preprocess import fit, to_square
from experts.vision.slot import Slot
from tools.camera.render import part_types
from tools.demo.line import SOLDER_DETECTORS, Thresholds
from tools.demo.pictures import Sample
from tools.demo.training import BACKBONE, CLASSIFIER, CLASSIFIERS, DETECTOR, DETECTORS, averaged_network
from tools.experts.measure import answers_of
from tools.training.backbone import stored_backbone, write_backbone
from tools.training.expert_file import Form
from tools.training.fit import Variation, calibrate
from tools.training.head import distance_limit, fit_linear, fit_usual, write_head
from tools.training.importer import import_model

_ORIGIN = "trained on rendered parts"
_STORE = "int8"
#: Weight of a false call against an escape, in shares of all good and all bad parts.
_FALSE_CALL_WEIGHT = 3.0
_MIN_CONFIDENCE, _MAX_CONFIDENCE = 0.12, 0.98
#: Lowest threshold of a head: a few calibration boards do not show its rarest mistakes.
_MIN_REVIEW = 0.6


def export_experts(
    folder: Path, out: Path, learn: Sequence[Sample], held_out: Sequence[Sample], limiting: Sequence[Sample]
) -> Catalog:
    """Write the networks whose checkpoints lie in `folder` as experts, and their catalog.

    Heads learn from `learn` and are calibrated on `held_out`; good ones among `limiting`, too, limit their pictures.
    """
    torch.set_num_threads(1)
    library = part_types()
    network = averaged_network(BACKBONE, folder)
    entry = write_backbone(network, CLASSIFIER, CLASSIFIERS.size, out, BACKBONE, store=_STORE)
    (out / entry["file"]).with_suffix(".pt").unlink()  # nobody trains on from here: the checkpoint is the source
    entries: dict[str, dict[str, Any]] = {BACKBONE: entry}
    catalog_entry = CatalogEntry.model_validate(entry)
    slot = stored_backbone(out, BACKBONE, entry)
    rng = np.random.default_rng(0)
    for name, part in library.items():
        mine = [sample for sample in learn if sample.component == name]
        unseen = [sample for sample in held_out if sample.component == name]
        head = fit_linear(features_of(slot, mine, rng)[:, :_FEATURES], _targets(mine), len(part.labels))
        features = features_of(slot, unseen)[:, :_FEATURES]
        temperature = calibrate(features @ head["weight"].T + head["bias"], _targets(unseen).numpy())
        good = [s for s in (*unseen, *limiting) if s.component == name and s.placement_label == "ok"]
        head["usual"], limits = usual_pictures(slot, [s for s in mine if s.placement_label == "ok"], good, mine)
        written = write_head("linear", head, catalog_entry, part.labels, out, expert=name, origin=_ORIGIN)
        entries[name] = written | {"temperature": temperature, "pictures": asdict(limits)}
    for detector in DETECTORS:
        pictures = [s.pixels for s in held_out if detector.covers(library[s.component]) and s.marks]
        report = import_model(
            averaged_network(detector.expert, folder),
            DETECTOR,
            detector.labels,
            detector.size,
            out,
            expert=detector.expert,
            images=pictures[:64],
            form=Form(origin=_ORIGIN, store=_STORE, tolerance=float("inf")),
        )
        limits = learn_limits(to_square(picture, "detect", detector.size) for picture in pictures)
        entries[detector.expert] = report.entry | {"confidence_floor": 0.1, "pictures": asdict(limits)}
    write_catalog(out / "catalog.yaml", entries)
    catalog, *problems = load_catalog(out / "catalog.yaml")
    assert catalog is not None, problems
    assert not any(problems), problems
    return catalog


def usual_pictures(
    slot: Slot, good: Sequence[Sample], held_out: Sequence[Sample], every: Sequence[Sample]
) -> tuple[torch.Tensor, PictureLimits]:
    """Return `usual` of good pictures (LinearHead), and the limits that good ones held out give, and pixels of all."""
    usual = fit_usual(features_of(slot, good), _FEATURES // 2)
    limits = learn_limits(to_square(s.pixels, "classify", slot.spec.input_size) for s in (*every, *held_out))
    return usual, replace(limits, distance=distance_limit(usual_distances(features_of(slot, held_out), usual)))


@dataclass(frozen=True, slots=True)
class Observed:
    """The experts' answers about a part: its head's label and confidence, and the surest box by solder label."""

    component: str
    truth: str
    label: str
    confidence: float
    boxes: dict[str, float]


def observe(catalog: Catalog, samples: Iterable[Sample]) -> list[Observed]:
    """Return the answers to each part, the detector's included whatever the head says."""
    library, samples = part_types(), list(samples)
    heads = _answers(catalog, samples, [sample.component for sample in samples])
    detectors = [SOLDER_DETECTORS[library[sample.component].family] for sample in samples]
    observed: list[Observed] = []
    for sample, head, boxes in zip(samples, heads, _answers(catalog, samples, detectors), strict=True):
        surest: dict[str, float] = {}
        for box in boxes.detections:
            surest[box.label] = max(surest.get(box.label, 0.0), box.confidence)
        observed.append(Observed(sample.component, sample.truth, str(head.label), float(head.confidence or 0), surest))
    return observed


def _answers(catalog: Catalog, samples: Sequence[Sample], experts: Sequence[str]) -> list[Answer]:
    answers: dict[int, Answer] = {}
    for expert in dict.fromkeys(experts):
        rows, spec = [row for row, name in enumerate(experts) if name == expert], catalog[ExpertId(expert)]
        images = (fit(samples[row].pixels, spec.task, spec.input_size) for row in rows)
        answers |= dict(zip(rows, answers_of(spec, images), strict=True))
    return [answers[row] for row in range(len(samples))]


def choose_thresholds(observed: Sequence[Observed]) -> Thresholds:
    """Return the confidences of the rules that divide good parts from bad ones, each for its component or family."""
    library = part_types()
    review_below: dict[str, float] = {}
    for name, part in library.items():
        passed = [o for o in observed if o.component == name and o.label == "ok"]
        good = [o.confidence for o in passed if o.truth == "ok"]
        bad = [o.confidence for o in passed if o.truth in part.labels and o.truth != "ok"]
        limit = 1 - divide([1 - c for c in good], [1 - c for c in bad])
        review_below[name] = round(max(limit, _MIN_REVIEW), 2)
    fail_on: dict[str, dict[str, float]] = {}
    for family in SOLDER_DETECTORS:
        mine = [o for o in observed if library[o.component].family == family]
        labels = {kind for part in library.values() if part.family == family for kind in part.defects}
        solder = next(d.labels for d in DETECTORS if d.expert == SOLDER_DETECTORS[family])
        fail_on[family] = {
            label: divide(
                [o.boxes.get(label, 0.0) for o in mine if o.truth == "ok"],
                [o.boxes.get(label, 0.0) for o in mine if o.truth == label],
            )
            for label in solder
            if label in labels
        }
    return Thresholds(review_below, fail_on)


def divide(good: Sequence[float], bad: Sequence[float]) -> float:
    """Return the value that divides good from bad best: among equal ones the middle, as far from both as can be.

    A good part at or above it is a false call, a bad one below it an escape.
    """
    candidates = np.arange(round(_MIN_CONFIDENCE * 100), round(_MAX_CONFIDENCE * 100) + 1) / 100
    calls = np.array([np.mean(np.asarray(good) >= c) if good else 0.0 for c in candidates])
    escapes = np.array([np.mean(np.asarray(bad) < c) if bad else 0.0 for c in candidates])
    costs = escapes + _FALSE_CALL_WEIGHT * calls
    best = candidates[costs <= costs.min() + 1e-9]
    return float(best[len(best) // 2])


def write_thresholds(out: Path, thresholds: Thresholds) -> None:
    text = json.dumps(asdict(thresholds), indent=2)
    (out / "thresholds.json").write_text(text + "\n", encoding="utf-8")


def _targets(samples: Sequence[Sample]) -> torch.Tensor:
    return torch.tensor([part_types()[s.component].labels.index(s.placement_label) for s in samples], dtype=torch.int64)


#: Features of the backbone's last layer.
_FEATURES = 512
_BATCH = 16


def features_of(slot: Slot, samples: Sequence[Sample], rng: np.random.Generator | None = None) -> torch.Tensor:
    """Return the features (N, F) of pictures, first those of the last layer; with `rng`, of varied copies."""
    rows: list[torch.Tensor] = []
    with torch.inference_mode():
        for start in range(0, len(samples), _BATCH):
            part = samples[start : start + _BATCH]
            squares = np.stack([to_square(s.pixels, "classify", slot.spec.input_size) for s in part])
            if rng is not None:
                lit = Variation()(squares, rng).mul_(255).round_().to(torch.uint8)
                squares = lit.permute(0, 2, 3, 1).contiguous().numpy()
            inputs = normalise(torch.from_numpy(squares), slot.spec, slot.layout.dtype)
            rows.append(slot.module(inputs).clone())
    return torch.cat(rows).clone() if rows else torch.zeros(0, _FEATURES)
