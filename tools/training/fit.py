"""Fits a classifier to pictures in memory: a whole network, or an expert that shares a backbone's early layers.

Pictures are (N, S, S, 3) uint8 RGB, made by `experts.vision.preprocess.to_square`, so that training and serving see
the same pixels. Every function is seeded; the caller sets the number of threads.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from experts.vision import frameworks
from experts.vision.architectures import NORMALISATIONS

Pictures = NDArray[np.uint8]
Targets = NDArray[np.int64]
OnProgress = Callable[[float], None]
#: Temperatures tried when confidences are calibrated on held-out pictures (softmax with temperature).
_TEMPERATURES = tuple(round(0.4 * 1.1**step, 4) for step in range(24))
#: How far the logarithm of a temperature is from 0 in general: pictures must speak for a temperature far from 1.
_TEMPERATURE_SPREAD = 0.3


#: Ways in which a part looks the same, as numbers of turned(): none but as it is; turned by half and mirrored; all.
SYMMETRIES: Mapping[str, tuple[int, ...]] = {"none": (0,), "half": (0, 2, 4, 6), "all": tuple(range(8))}
#: Copies of a picture, turned and mirrored, that `fit_turned` tells apart.
TURNS = 8


def turned(picture: Pictures, way: int) -> Pictures:
    """Return a picture (S, S, 3) turned by `way` quarters, mirrored from the fourth on."""
    picture = np.rot90(picture, way % 4)
    return picture[:, ::-1] if way >= 4 else picture


@dataclass(frozen=True, slots=True)
class Variation:
    """The differences between two pictures of the same kind: exposure, contrast, white balance and noise always.

    A part lies up to `play` pixels beside its place and is turned as much at its rim; it looks the same in the ways of
    `symmetry`. By default it is never moved or mirrored: its position and direction are what the classifier judges.
    """

    play: float = 0.0
    symmetry: str = "none"

    def __call__(self, pictures: Pictures, rng: np.random.Generator) -> torch.Tensor:
        """Return (N, 3, S, S) in 0..1."""
        ways = SYMMETRIES[self.symmetry]
        if len(ways) > 1:
            chosen = rng.choice(ways, len(pictures))
            pictures = np.stack([turned(picture, way) for picture, way in zip(pictures, chosen, strict=True)])
        if self.play:
            pictures = np.stack([self._moved(picture, rng) for picture in pictures])
        return _lit(pictures, rng)

    def _moved(self, picture: Pictures, rng: np.random.Generator) -> Pictures:
        half = picture.shape[0] / 2
        matrix = cv2.getRotationMatrix2D((half, half), math.degrees(rng.uniform(-self.play, self.play) / half), 1.0)
        matrix[:, 2] += rng.uniform(-self.play, self.play, 2)
        moved = cv2.warpAffine(
            np.ascontiguousarray(picture), matrix, picture.shape[:2], borderMode=cv2.BORDER_REPLICATE
        )
        return np.asarray(moved, np.uint8)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length and speed of a training with AdamW and one cycle of the learning rate."""

    epochs: int
    batch: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    label_smoothing: float = 0.05
    seed: int = 0


def new_network(architecture: str, classes: int) -> nn.Module:
    return getattr(frameworks.torchvision().models, architecture)(num_classes=classes)


def fit_network(
    network: nn.Module,
    pictures: Pictures,
    targets: Targets,
    schedule: Schedule,
    on_progress: OnProgress = lambda _: None,
    vary: Variation = Variation(),
) -> nn.Module:
    """Train all of `network` and return it in eval mode. `on_progress` gets shares from 0 to 1."""

    def batches(rng: np.random.Generator) -> Iterator[tuple[torch.Tensor, Targets]]:
        for rows in _shuffled(len(targets), schedule.batch, rng):
            yield vary(pictures[rows], rng), targets[rows]

    return _fit_pictures(network, batches, len(targets), schedule, on_progress)


def fit_turned(
    network: nn.Module, pictures: Pictures, targets: Targets, schedule: Schedule, on_progress: OnProgress
) -> nn.Module:
    """Train a backbone: a network of `TURNS` outputs per class, which tells turned and mirrored copies apart.

    So each picture counts as eight, each in a class of its own (Lee et al., arXiv 1910.05872). Labels
    with few pictures are drawn more often than their share, but less often than labels with many.
    """
    weights = 1 / np.sqrt(np.bincount(targets))[targets]
    weights /= weights.sum()

    def batches(rng: np.random.Generator) -> Iterator[tuple[torch.Tensor, Targets]]:
        drawn = rng.choice(len(targets), len(targets), p=weights)
        for places in _shuffled(len(drawn), schedule.batch, rng):
            rows, ways = drawn[places], rng.integers(TURNS, size=len(places))
            copies = np.stack([turned(pictures[row], way) for row, way in zip(rows, ways, strict=True)])
            yield _lit(copies, rng), targets[rows] * TURNS + ways

    return _fit_pictures(network, batches, len(targets), schedule, on_progress)


def _fit_pictures(
    network: nn.Module,
    batches: Callable[[np.random.Generator], Iterator[tuple[torch.Tensor, Targets]]],
    count: int,
    schedule: Schedule,
    on_progress: OnProgress,
) -> nn.Module:
    """Train all of `network` on batches of pictures (N, 3, S, S) in 0..1; return it in eval mode."""
    network.train().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - torch's stub lacks it
    rng = np.random.default_rng(schedule.seed)
    mean, deviation = normalisation()

    def normalised() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for pictures, truth in batches(rng):
            tensor = pictures.sub_(mean).div_(deviation)
            yield tensor.contiguous(memory_format=torch.channels_last), torch.from_numpy(truth)

    _run(network, normalised, count, schedule, on_progress)
    return network.eval()


def fit_last_block(network: nn.Module, features: torch.Tensor, targets: Targets, schedule: Schedule) -> nn.Module:
    """Train the last block and the last layer of `network`, and return it in eval mode.

    The early layers do not change, so their `features` (early_features) are computed once: an expert costs seconds, not
    minutes.
    """
    head: nn.Linear = network.fc  # type: ignore[assignment]
    tail = nn.Sequential(network.layer4, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)  # type: ignore[arg-type]
    for module in tail.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.02  # few pictures: stay near the backbone's statistics
    tail.train()
    rng = np.random.default_rng(schedule.seed)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for places in _shuffled(len(targets), schedule.batch, rng):
            yield features[torch.from_numpy(places)], torch.from_numpy(targets[places])

    _run(tail, batches, len(targets), schedule, lambda _: None)
    return network.eval()


def early_features(
    network: nn.Module, pictures: Pictures, rng: np.random.Generator, vary: Variation = Variation()
) -> torch.Tensor:
    """Return the features of varied `pictures` before the last block."""
    parts = [getattr(network, name) for name in ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3")]
    return features_of(nn.Sequential(*parts).eval(), pictures, vary, rng)


def features_of(network: nn.Module, pictures: Pictures, vary: Variation, rng: np.random.Generator) -> torch.Tensor:
    """Return what a network makes of varied pictures, such as (N, F) features of a Backbone (networks.py)."""
    return _outputs(network, pictures, lambda part: vary(part, rng))


def logits_of(network: nn.Module, pictures: Pictures) -> torch.Tensor:
    """Return what a network makes of pictures as they are: (N, classes) float32, (N, F) of a Backbone."""
    return _outputs(network, pictures, lambda part: torch.from_numpy(part).permute(0, 3, 1, 2).float().div_(255))


def _outputs(network: nn.Module, pictures: Pictures, read: Callable[[Pictures], torch.Tensor]) -> torch.Tensor:
    """`read` gives (N, 3, S, S) in 0..1. The outputs can be trained on."""
    mean, deviation = normalisation()
    outputs: list[torch.Tensor] = []
    with torch.no_grad():
        for start in range(0, len(pictures), 64):
            tensor = read(pictures[start : start + 64]).sub_(mean).div_(deviation)
            outputs.append(network(tensor.contiguous(memory_format=torch.channels_last)))
    return torch.cat(outputs) if outputs else torch.zeros(0, 0)


def calibrate(logits: torch.Tensor, targets: Targets) -> float:
    """Return the softmax temperature with the least negative log likelihood on held-out pictures.

    A few pictures, all answered right, are no reason to be surer: they weigh against a temperature of 1.
    """
    truth = torch.from_numpy(targets)

    def penalised_loss(temperature: float) -> float:
        loss = float(functional.cross_entropy(logits / temperature, truth, reduction="sum"))
        return loss + 0.5 * (math.log(temperature) / _TEMPERATURE_SPREAD) ** 2

    return min(_TEMPERATURES, key=penalised_loss)


def _run(
    network: nn.Module,
    batches: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]],
    count: int,
    schedule: Schedule,
    on_progress: OnProgress,
) -> None:
    trained = [p for p in network.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=schedule.learning_rate, weight_decay=schedule.weight_decay, fused=True)
    steps = schedule.epochs * math.ceil(count / schedule.batch)
    cycle_steps = max(steps, 4) + 1  # with exactly four, OneCycleLR's rise would have no length
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, schedule.learning_rate, total_steps=cycle_steps, pct_start=0.25
    )
    step = 0
    for _ in range(schedule.epochs):
        for inputs, truth in batches():
            loss = functional.cross_entropy(network(inputs), truth, label_smoothing=schedule.label_smoothing)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            cycle.step()
            step += 1
            on_progress(step / steps)


def _shuffled(count: int, batch: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    order = rng.permutation(count)
    for start in range(0, count, batch):
        rows = order[start : start + batch]
        yield rows if len(rows) > 1 else order[:2]  # batch norm needs two


def _lit(pictures: Pictures, rng: np.random.Generator) -> torch.Tensor:
    """Return (N, 3, S, S) in 0..1, each with another exposure, contrast, white balance and noise."""
    tensor = torch.from_numpy(pictures).permute(0, 3, 1, 2).float().div_(255)
    count = len(pictures)
    gain = torch.from_numpy(rng.uniform(0.85, 1.15, (count, 1, 1, 1)) * rng.uniform(0.95, 1.05, (count, 3, 1, 1)))
    offset = torch.from_numpy(rng.uniform(-0.06, 0.06, (count, 1, 1, 1)))
    noise = torch.from_numpy(rng.standard_normal(tuple(tensor.shape), dtype=np.float32)) * 0.012
    return tensor.mul_(gain.float()).add_(offset.float()).add_(noise).clamp_(0, 1)


def normalisation() -> tuple[torch.Tensor, torch.Tensor]:
    mean, deviation = NORMALISATIONS["imagenet"]
    return torch.tensor(mean).view(1, 3, 1, 1), torch.tensor(deviation).view(1, 3, 1, 1)
