"""Renders parts and trains the demo's 18 experts on them: 16 heads on one ResNet-18, two shared YOLO nanos.

Parts are on panels in looks that no product has, and on some units of the products.

Two processes with one thread each train side by side: two executors of one thread beat one of two, in training as in
serving. The classifiers and the smaller detector together take about as long as the larger one. Steps and epochs are
fixed, so that a seed gives the same experts on any machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experts.vision.preprocess import to_square
from tools.camera.render import (
    PartType,
    RenderedBoard,
    SolderMark,
    board_types,
    part_types,
    render_board,
    render_unit,
    training_panel,
)
from tools.camera.render.board import PixelArray

CLASSIFIER = "resnet18"
DETECTOR = "yolov8n"
CLASSIFIER_SIZE = 64
BACKBONE = "parts"
_BACKBONE_EPOCHS, _BACKBONE_LEARNING_RATE = 5, 2e-3
#: Features of its last layer, and varied copies of each picture from which a head learns.
_FEATURES, _COPIES = 512, 2
_ORIGIN = "trained on rendered parts"
#: Share of good parts on a panel; the rest is spread evenly over what can go wrong with that part.
_GOOD_SHARE = 0.36
PARTS_PER_PANEL = 48
#: Share of parts with a defect on the products' units, and the first of their seeds: no judged or shown board has them.
_UNIT_DEFECT_RATE, _FIRST_UNIT_SEED = 0.5, 300_000
#: Share of the samples that train; the rest calibrates confidences and thresholds.
TRAINING_SHARE = 0.88

OnShare = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """A part: (n, n, 3) uint8 RGB, its truth (`ok` or a defect kind), and its solder marks in crop pixels."""

    component: str
    truth: str
    pixels: PixelArray
    marks: tuple[SolderMark, ...]

    @property
    def placement_label(self) -> str:
        """Return the label that the part's classifier should answer; it does not judge solder."""
        return self.truth if self.truth in part_types()[self.component].labels else "ok"


def render_panels(numbers: Sequence[int]) -> list[Sample]:
    """Return the parts of the panels with these numbers. A number is a seed: the same panel each time."""
    library = part_types()
    names = list(library)
    samples: list[Sample] = []
    for number in numbers:
        rng = np.random.default_rng([911, number])
        components = [names[(number * 7 + index) % len(names)] for index in range(PARTS_PER_PANEL)]
        kinds = ["ok" if rng.random() < _GOOD_SHARE else str(rng.choice(library[name].defects)) for name in components]
        samples += _samples(render_unit(training_panel(components, number), kinds, rng))
    return samples


def render_units(numbers: Sequence[int]) -> list[Sample]:
    """Return the parts of units of the four products in turn, with the traces and vias that the experts will meet."""
    products = sorted(board_types())
    boards = [
        render_board(products[number % len(products)], _FIRST_UNIT_SEED + number, _UNIT_DEFECT_RATE)
        for number in numbers
    ]
    return [sample for board in boards for sample in _samples(board)]


def _samples(board: RenderedBoard) -> list[Sample]:
    return [Sample(p.component, p.truth, p.pixels, p.marks) for p in board.placements]


@dataclass(frozen=True, slots=True)
class SharedDetector:
    """A detector that many component types share; `steps` of 16 pictures of `input_size` pixels."""

    expert: str
    families: tuple[str, ...]
    labels: tuple[str, ...]
    input_size: int
    steps: int

    @property
    def effort(self) -> int:
        """Return the pixels to learn from; the training time is proportional to them."""
        return self.steps * self.input_size**2

    def covers(self, part: PartType) -> bool:
        return part.family in self.families


DETECTORS = (
    SharedDetector("solder-chip", ("chip", "led", "electrolytic"), ("insufficient", "bridge"), 96, 500),
    SharedDetector(
        "solder-leaded", ("sot23", "soic", "qfp", "connector"), ("insufficient", "lifted_lead", "bridge"), 128, 1700
    ),
)


def split(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Return samples to train on, and samples to calibrate on."""
    cut = round(len(samples) * TRAINING_SHARE)
    return list(samples[:cut]), list(samples[cut:])


def train_classifiers(samples: list[Sample], out: Path, on_share: OnShare) -> dict[str, dict[str, Any]]:
    """Train a backbone, and a head on it for each component type; return catalog entries by expert id."""
    import torch

    from experts.catalog import CatalogEntry
    from experts.vision.networks import Backbone
    from tools.training import fit
    from tools.training.backbone import write_backbone
    from tools.training.head import fit_linear, write_head

    torch.set_num_threads(1)
    torch.manual_seed(0)
    library = part_types()
    classes = [(name, label) for name, part in library.items() for label in part.labels]
    index = {pair: number for number, pair in enumerate(classes)}
    training, calibration = split(samples)
    network = fit.new_network(CLASSIFIER, len(classes))
    targets = np.array([index[s.component, s.placement_label] for s in training])
    schedule = fit.Schedule(_BACKBONE_EPOCHS, learning_rate=_BACKBONE_LEARNING_RATE)
    pictures = _pictures(training, CLASSIFIER_SIZE)
    network = fit.fit_network(network, pictures, targets, schedule, lambda share: on_share(0.9 * share))
    entry = write_backbone(network, CLASSIFIER, CLASSIFIER_SIZE, out, BACKBONE)
    entries: dict[str, dict[str, Any]] = {BACKBONE: entry}
    backbone, rng = Backbone(network).eval(), np.random.default_rng(0)
    for number, (name, part) in enumerate(library.items()):
        mine, held_out = ([s for s in part_of if s.component == name] for part_of in (training, calibration))
        own = _pictures(mine, CLASSIFIER_SIZE)
        features = [fit.features_of(backbone, own, fit.Variation(), rng)[:, :_FEATURES] for _ in range(_COPIES)]
        truth = torch.from_numpy(np.tile(_targets(mine, part), _COPIES))
        head = fit_linear(torch.cat(features), truth, len(part.labels))
        unseen = fit.logits_of(backbone, _pictures(held_out, CLASSIFIER_SIZE))[:, :_FEATURES]
        logits = unseen @ head["weight"].T + head["bias"]
        written = write_head(
            "linear", head, CatalogEntry.model_validate(entry), part.labels, out, expert=name, origin=_ORIGIN
        )
        entries[name] = written | {"temperature": fit.calibrate(logits, _targets(held_out, part))}
        on_share(0.9 + 0.1 * (number + 1) / len(library))
    return entries


def train_detector(number: int, samples: list[Sample], out: Path, on_share: OnShare) -> dict[str, dict[str, Any]]:
    """Train and import `DETECTORS[number]`; return its catalog entry by expert id."""
    import torch

    from tools.training.detector_loop import TrainingEffort, fit_detector
    from tools.training.expert_file import Form
    from tools.training.importer import import_model

    torch.set_num_threads(1)
    training, calibration = split(samples)
    detector = DETECTORS[number]
    model = fit_detector(
        SolderSampler(training, detector),
        detector.labels,
        DETECTOR,
        detector.input_size,
        TrainingEffort(steps=detector.steps, learning_rate=2e-3, seed=number, threads=1),
        on_progress=lambda progress: on_share(progress.share),
    )
    report = import_model(
        model,
        DETECTOR,
        detector.labels,
        detector.input_size,
        out,
        expert=detector.expert,
        images=[s.pixels for s in calibration if detector.covers(part_types()[s.component])][:8],
        form=Form(origin=_ORIGIN),
    )
    return {detector.expert: report.entry | {"confidence_floor": 0.1}}


class SolderSampler:
    """Pictures for a solder detector: parts that lie where they should, every solder defect equally often.

    Good joints have no label: there are up to 44 on a part, and the loss is shared among all labelled boxes, so that a
    rare lifted lead would hardly count. Solder looks the same from every side, so pictures are mirrored and turned;
    exposure varies.
    """

    _GOOD_SHARE = 0.2

    def __init__(self, samples: Sequence[Sample], detector: SharedDetector) -> None:
        library = part_types()
        mine = [s for s in samples if detector.covers(library[s.component]) and s.marks]
        self._size = detector.input_size
        self._labels = detector.labels
        self._good = [self._square(s) for s in mine if s.truth == "ok"]
        bad = [[self._square(s) for s in mine if s.truth == label] for label in detector.labels]
        self._bad = [pictures for pictures in bad if pictures]

    def __call__(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        kind = self._good if rng.random() < self._GOOD_SHARE else self._bad[int(rng.integers(len(self._bad)))]
        pixels, boxes = kind[int(rng.integers(len(kind)))]
        boxes = boxes.copy()
        for _ in range(int(rng.integers(4))):
            pixels = np.rot90(pixels)
            x1, y1, x2, y2 = (boxes[:, column].copy() for column in range(4))
            boxes[:, 0], boxes[:, 1], boxes[:, 2], boxes[:, 3] = y1, self._size - x2, y2, self._size - x1
        if rng.random() < 0.5:
            pixels = pixels[:, ::-1]
            boxes[:, [0, 2]] = self._size - boxes[:, [2, 0]]
        lit = pixels.astype(np.float32) * rng.uniform(0.85, 1.15) + rng.uniform(-12, 12)
        return np.clip(lit, 0, 255).astype(np.uint8), boxes

    def _square(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        gain = self._size / sample.pixels.shape[0]
        marks = [mark for mark in sample.marks if mark.label in self._labels]
        rows = [(*(value * gain for value in mark.box), self._labels.index(mark.label)) for mark in marks]
        boxes = np.array(rows, np.float32).reshape(-1, 5)
        boxes[:, :4] = np.clip(boxes[:, :4], 0, self._size)
        return to_square(sample.pixels, "detect", self._size), boxes


def _pictures(samples: Sequence[Sample], size: int) -> np.ndarray:
    return np.stack([to_square(sample.pixels, "classify", size) for sample in samples])


def _targets(samples: Sequence[Sample], part: PartType) -> np.ndarray:
    return np.array([part.labels.index(sample.placement_label) for sample in samples])
