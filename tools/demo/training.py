"""Trains the demo's three networks on rendered parts: a ResNet-18 for 16 heads, and two shared YOLO nanos for solder.

A training writes a checkpoint every few minutes and goes on from it. Every step draws its pictures from a generator of
its own, so that a training that was interrupted gives what an uninterrupted one gives.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree

from experts.vision.preprocess import to_square
from tools.camera.render import PartType, part_types
from tools.demo.line import SOLDER_DETECTORS
from tools.demo.pictures import Sample, read_files
from tools.training import fit
from tools.training.detector_loop import Descent, collate, new_detector

CLASSIFIER, DETECTOR = "resnet18", "yolov8n"
BACKBONE = "parts"
#: Files that training begins with, and the steps between further ones.
_FIRST_FILES, _STEPS_PER_FILE = 6, 40
#: Share of the loss that tells all labels of all components apart; the rest only those of the picture's component.
_OTHERS_SHARE = 0.15
_WARM_UP_STEPS, _CLOSING_SHARE = 200, 0.35
_EMA_DECAY = 0.998
_CHECKPOINT_EVERY_S = 150.0


@dataclass(frozen=True, slots=True)
class Lesson:
    """The length of a training: steps of `batch` pictures, the first ones of `first_size` pixels, then of `size`.

    `labels` are those of a solder detector, which many component types share.
    """

    expert: str
    size: int
    first_size: int
    first_steps: int
    steps: int
    batch: int
    learning_rate: float = 2e-3
    labels: tuple[str, ...] = ()

    def shortened(self, share: float) -> "Lesson":
        steps, first = max(2, round(self.steps * share)), round(self.first_steps * share)
        return replace(self, steps=steps, first_steps=first)

    def covers(self, part: PartType) -> bool:
        return SOLDER_DETECTORS[part.family] == self.expert

    def size_at(self, step: int) -> int:
        return self.first_size if step < self.first_steps else self.size

    def rate_at(self, step: int) -> float:
        """Learning rate: warm-up, constant, then linear decay to a hundredth."""
        closing = (self.steps - step) / (self.steps * _CLOSING_SHARE)
        return self.learning_rate * min(1.0, (step + 1) / _WARM_UP_STEPS) * min(1.0, max(closing, 0.01))


CLASSIFIERS = Lesson(BACKBONE, size=96, first_size=64, first_steps=2000, steps=4000, batch=32)
_CHIP, _LEADED = ("insufficient", "bridge"), ("insufficient", "lifted_lead", "bridge")
DETECTORS = (
    Lesson("solder-chip", size=96, first_size=96, first_steps=0, steps=1500, batch=16, labels=_CHIP),
    Lesson("solder-leaded", size=160, first_size=128, first_steps=2500, steps=5000, batch=16, labels=_LEADED),
)
_LESSONS = {lesson.expert: lesson for lesson in (CLASSIFIERS, *DETECTORS)}


class Pictures:
    """The rendered parts that a step may draw from: more of them as the training proceeds."""

    def __init__(self, folder: Path, files: int, wanted: Callable[[Sample], bool]) -> None:
        self._folder, self._files, self._wanted = folder, files, wanted
        self._read = 0
        self.samples: list[Sample] = []

    def at(self, step: int) -> bool:
        """Read what this step may draw from, waiting for files that are still being rendered; True if there is more."""
        needed = min(self._files, _FIRST_FILES + step // _STEPS_PER_FILE)
        if needed <= self._read:
            return False
        while not (self._folder / f"parts-{needed - 1:04d}.npz").exists():
            time.sleep(1)
        self.samples += filter(self._wanted, read_files(self._folder, range(self._read, needed)))
        self._read = needed
        return True


class PartLoss:
    """The loss of the network under the heads: it tells the labels of every component apart."""

    def __init__(self, pictures: Pictures, lesson: Lesson) -> None:
        library = part_types()
        self.classes = [(name, label) for name, part in library.items() for label in part.labels]
        self._index = {pair: number for number, pair in enumerate(self.classes)}
        names = np.array([name for name, _ in self.classes])
        self._others = {name: torch.from_numpy(names != name) for name in library}
        self._pictures, self._lesson = pictures, lesson
        self._mean, self._deviation = fit.normalisation()

    def new_model(self) -> nn.Module:
        return fit.new_network(CLASSIFIER, len(self.classes)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def __call__(self, model: nn.Module, step: int, rng: np.random.Generator) -> torch.Tensor:
        self._pictures.at(step)
        samples = self._pictures.samples
        drawn = [samples[row] for row in rng.integers(len(samples), size=self._lesson.batch)]
        squares = np.stack([to_square(s.pixels, "classify", self._lesson.size_at(step)) for s in drawn])
        inputs = fit.Variation()(squares, rng).sub_(self._mean).div_(self._deviation)
        truth = torch.tensor([self._index[s.component, s.placement_label] for s in drawn])
        others = torch.stack([self._others[s.component] for s in drawn])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs.contiguous(memory_format=torch.channels_last))
        logits = logits.float()
        own = functional.cross_entropy(logits.masked_fill(others, -1e4), truth)
        return own + _OTHERS_SHARE * functional.cross_entropy(logits, truth)


class SolderLoss:
    """The loss of a solder detector, on parts that lie where they should, every solder defect equally often.

    Good joints have no label: there are up to 44 on a part, and the loss is shared among all labelled boxes, so that a
    rare lifted lead would hardly count. Solder looks the same from every side, so pictures are mirrored and turned;
    exposure varies.
    """

    _GOOD_SHARE = 0.35

    def __init__(self, pictures: Pictures, labels: tuple[str, ...], lesson: Lesson) -> None:
        self._pictures, self._labels, self._lesson = pictures, labels, lesson
        self._good: list[Sample] = []
        self._bad: list[list[Sample]] = []

    def new_model(self) -> nn.Module:
        return new_detector(DETECTOR, self._labels)

    def __call__(self, model: nn.Module, step: int, rng: np.random.Generator) -> torch.Tensor:
        self.read(step)
        size = self._lesson.size_at(step)
        batch = collate([self.picture(size, rng) for _ in range(self._lesson.batch)], size)
        with torch.autocast("cpu", torch.bfloat16):
            predicted = model(batch["img"])
        predicted = _pytree.tree_map_only(torch.Tensor, torch.Tensor.float, predicted)
        return cast("Any", model).loss(batch, predicted)[0].sum()

    def read(self, step: int) -> None:
        if self._pictures.at(step):
            samples = self._pictures.samples
            self._good = [s for s in samples if s.truth == "ok"]
            bad = [[s for s in samples if s.truth == label] for label in self._labels]
            self._bad = [pictures for pictures in bad if pictures]

    def picture(self, size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (size, size, 3) uint8 pixels and rows of x1 y1 x2 y2 class."""
        kind = self._good if rng.random() < self._GOOD_SHARE else self._bad[int(rng.integers(len(self._bad)))]
        sample = kind[int(rng.integers(len(kind)))]
        pixels, boxes = to_square(sample.pixels, "detect", size), self._boxes(sample, size)
        for _ in range(int(rng.integers(4))):
            pixels = np.rot90(pixels)
            x1, y1, x2, y2 = (boxes[:, column].copy() for column in range(4))
            boxes[:, 0], boxes[:, 1], boxes[:, 2], boxes[:, 3] = y1, size - x2, y2, size - x1
        if rng.random() < 0.5:
            pixels = pixels[:, ::-1]
            boxes[:, [0, 2]] = size - boxes[:, [2, 0]]
        lit = pixels.astype(np.float32) * rng.uniform(0.85, 1.15) + rng.uniform(-12, 12)
        return np.clip(lit, 0, 255).astype(np.uint8), boxes

    def _boxes(self, sample: Sample, size: int) -> np.ndarray:
        gain, labels = size / sample.pixels.shape[0], self._labels
        rows = [(*(v * gain for v in m.box), labels.index(m.label)) for m in sample.marks if m.label in labels]
        boxes = np.array(rows, np.float32).reshape(-1, 5)
        boxes[:, :4] = np.clip(boxes[:, :4], 0, size)
        return boxes


def train_network(expert: str, folder: Path, files: int, steps_share: float = 1.0) -> None:
    """Train the network `expert` on `folder/pictures`, or go on with it from its last checkpoint."""
    torch.set_num_threads(1)
    lesson = _LESSONS[expert].shortened(steps_share)
    loss, checkpoint = network_loss(expert, folder, files, lesson), folder / f"{expert}.checkpoint"
    train_on(loss, lesson, checkpoint, lambda share: print(f"{expert}: {share:.0%} of its training", flush=True))


def train_on(
    loss: "PartLoss | SolderLoss",
    lesson: Lesson,
    checkpoint: Path,
    on_saved: Callable[[float], None] = lambda _: None,
    every_s: float = _CHECKPOINT_EVERY_S,
) -> None:
    """Train a network by its loss, or go on with it; write checkpoints at regular times and at the end.

    `on_saved` gets the share of the training that each of them has behind it.
    """
    torch.manual_seed(0)
    descent, begin, spent_s = Descent(loss.new_model(), _EMA_DECAY), 0, 0.0
    parts = {"model": descent.model, "average": descent.average, "optimiser": descent.optimiser}
    if checkpoint.exists():
        state = _read(checkpoint)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        begin, spent_s = state["step"], state["spent_s"]
    saved_s = time.monotonic()
    for step in range(begin, lesson.steps):
        began_s, done = time.monotonic(), step + 1
        descent.step(loss(descent.model, step, np.random.default_rng([5, step])), lesson.rate_at(step), done)
        spent_s += time.monotonic() - began_s
        if time.monotonic() - saved_s >= every_s or done == lesson.steps:
            file = checkpoint.with_suffix(f".{os.getpid()}.part")
            torch.save({name: p.state_dict() for name, p in parts.items()} | {"step": done, "spent_s": spent_s}, file)
            file.replace(checkpoint)
            saved_s = time.monotonic()
            on_saved(done / lesson.steps)


def spent_s(expert: str, folder: Path) -> float:
    return float(_read(folder / f"{expert}.checkpoint")["spent_s"])


def averaged_network(expert: str, folder: Path) -> nn.Module:
    """Return the network `expert` as far as it is trained. Raises FileNotFoundError without a checkpoint."""
    loss = network_loss(expert, folder, 0)
    model = loss.new_model()
    model.load_state_dict(_read(folder / f"{expert}.checkpoint")["average"])
    return model.eval()


def _read(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint, map_location="cpu", weights_only=True)


def network_loss(expert: str, folder: Path, files: int, lesson: Lesson | None = None) -> PartLoss | SolderLoss:
    library, own = part_types(), _LESSONS[expert]
    if expert == BACKBONE:
        return PartLoss(Pictures(folder / "pictures", files, lambda _: True), lesson or own)
    wanted = lambda s: bool(s.marks) and own.covers(library[s.component])  # noqa: E731
    return SolderLoss(Pictures(folder / "pictures", files, wanted), own.labels, lesson or own)
