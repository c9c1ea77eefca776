"""Fits a classifier to pictures in memory: a whole network, or an expert that shares a backbone's early layers.

Pictures are (N, S, S, 3) uint8 RGB, made by `experts.vision.preprocess.to_square`, so that training and serving see
the same pixels. Every function is seeded; the caller sets the number of threads.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
    """Return an untrained torchvision network."""
    return getattr(frameworks.torchvision().models, architecture)(num_classes=classes)


def fit_network(
    network: nn.Module,
    pictures: Pictures,
    targets: Targets,
    schedule: Schedule,
    on_progress: OnProgress = lambda _: None,
) -> nn.Module:
    """Train all of `network` and return it in eval mode. `on_progress` gets shares from 0 to 1."""
    network.train().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - torch's stub lacks it
    rng = np.random.default_rng(schedule.seed)
    mean, deviation = _normalisation()

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for rows in _shuffled(len(targets), schedule.batch, rng):
            tensor = _augmented(pictures[rows], rng).sub_(mean).div_(deviation)
            yield tensor.contiguous(memory_format=torch.channels_last), torch.from_numpy(targets[rows])

    _run(network, batches, len(targets), schedule, on_progress)
    return network.eval()


def fit_expert(
    backbone: nn.Module, pictures: Pictures, targets: Targets, rows: Sequence[int], schedule: Schedule
) -> nn.Module:
    """Return a copy of the backbone with its last block and a new head trained.

    `rows` are the backbone's outputs that the head begins with. The early layers do not change, so their features are
    computed once: an expert costs seconds, not minutes.
    """
    network = copy.deepcopy(backbone).eval()
    old: nn.Linear = network.fc  # type: ignore[assignment]
    head = nn.Linear(old.in_features, len(rows))
    with torch.no_grad():
        head.weight.copy_(old.weight[list(rows)])
        head.bias.copy_(old.bias[list(rows)])
    network.fc = head
    features = early_features(network, pictures, np.random.default_rng(schedule.seed))
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


def early_features(network: nn.Module, pictures: Pictures, rng: np.random.Generator) -> torch.Tensor:
    """Return the features of augmented `pictures` before the last block."""
    mean, deviation = _normalisation()
    parts = [getattr(network, name) for name in ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3")]
    early = nn.Sequential(*parts).eval()
    features: list[torch.Tensor] = []
    with torch.no_grad():
        for start in range(0, len(pictures), 64):
            tensor = _augmented(pictures[start : start + 64], rng).sub_(mean).div_(deviation)
            features.append(early(tensor.contiguous(memory_format=torch.channels_last)))
    return torch.cat(features)


def logits_of(network: nn.Module, pictures: Pictures) -> torch.Tensor:
    """Return (N, classes) float32 for pictures without augmentation."""
    mean, deviation = _normalisation()
    logits: list[torch.Tensor] = []
    with torch.inference_mode():
        for start in range(0, len(pictures), 64):
            tensor = torch.from_numpy(pictures[start : start + 64]).permute(0, 3, 1, 2).float().div_(255)
            logits.append(network(tensor.sub_(mean).div_(deviation).contiguous(memory_format=torch.channels_last)))
    return torch.cat(logits) if logits else torch.zeros(0, 0)


def calibrate(logits: torch.Tensor, targets: Targets) -> float:
    """Return the softmax temperature with the least negative log likelihood on held-out pictures."""
    truth = torch.from_numpy(targets)
    return min(_TEMPERATURES, key=lambda t: float(functional.cross_entropy(logits / t, truth)))


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


def _augmented(pictures: Pictures, rng: np.random.Generator) -> torch.Tensor:
    """Return (N, 3, S, S) in 0..1, each with another exposure, contrast, white balance and noise.

    Pictures are never moved or mirrored: the position and direction of a part are what the classifier judges.
    """
    tensor = torch.from_numpy(pictures).permute(0, 3, 1, 2).float().div_(255)
    count = len(pictures)
    gain = torch.from_numpy(rng.uniform(0.85, 1.15, (count, 1, 1, 1)) * rng.uniform(0.95, 1.05, (count, 3, 1, 1)))
    offset = torch.from_numpy(rng.uniform(-0.06, 0.06, (count, 1, 1, 1)))
    noise = torch.from_numpy(rng.standard_normal(tuple(tensor.shape), dtype=np.float32)) * 0.012
    return tensor.mul_(gain.float()).add_(offset.float()).add_(noise).clamp_(0, 1)


def _normalisation() -> tuple[torch.Tensor, torch.Tensor]:
    mean, deviation = NORMALISATIONS["imagenet"]
    return torch.tensor(mean).view(1, 3, 1, 1), torch.tensor(deviation).view(1, 3, 1, 1)
