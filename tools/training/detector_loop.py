"""Trains a YOLO detector for a given number of minutes or steps: one small loop around ultralytics' model and loss.

Ultralytics' own trainer counts in epochs, starts data loaders and validates between epochs. The model and the loss are
ultralytics' own. Training images come from a *sampler*: photographs, or rendered parts.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from experts.vision.architectures import ARCHITECTURES, YOLO_STRIDE_PIXELS
from experts.vision.networks import build_original
from tools.training import TrainingError, architecture_of

Image = NDArray[np.uint8]
#: One training example: (S, S) or (S, S, 3) uint8 RGB, and (n, 5) float32 rows of x1 y1 x2 y2 class in its pixels.
Sample = tuple[Image, NDArray[np.float32]]
Sampler = Callable[[np.random.Generator], Sample]

_WEIGHT_DECAY, _BETAS, _MAX_GRADIENT = 0.02, (0.9, 0.99), 10.0
_WARM_UP_STEPS, _WARM_UP_SHARE = 300, 0.05
_LAST_LEARNING_RATE = 0.01
_EMA_DECAY = 0.999
#: Epochs that a training counts as for ultralytics' two-headed loss.
_EPOCHS = 100


@dataclass(frozen=True, slots=True)
class TrainingEffort:
    """The length and the settings of a training: `minutes` of the clock, or `steps`, with which runs repeat exactly.

    `closing_share` is the last part of the training, which uses the closing sampler.
    """

    minutes: float | None = None
    steps: int | None = None
    batch: int = 16
    learning_rate: float = 2e-3
    seed: int = 0
    threads: int = 2
    closing_share: float = 0.15

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise TrainingError("say how long to train: either minutes or steps")

    def share(self, step: int, spent_s: float) -> float:
        done = step / self.steps if self.steps is not None else spent_s / (cast("float", self.minutes) * 60)
        return min(done, 1.0)

    def rate_at(self, step: int, share: float) -> float:
        """Return the learning rate: a linear warm-up over at most 300 steps, and half a cosine down to a hundredth."""
        warm_up = min(1.0, max((step + 1) / _WARM_UP_STEPS, share / _WARM_UP_SHARE))
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        return self.learning_rate * warm_up * (_LAST_LEARNING_RATE + (1 - _LAST_LEARNING_RATE) * cosine)


@dataclass(frozen=True, slots=True)
class Progress:
    """The state after a step: number of steps, share of the training that is over, smoothed loss of one image."""

    step: int
    share: float
    loss: float
    spent_s: float


OnProgress = Callable[[Progress], None]


def fit_detector(
    sampler: Sampler,
    classes: Sequence[str],
    architecture: str,
    input_size: int,
    effort: TrainingEffort,
    *,
    closing: Sampler | None = None,
    on_progress: OnProgress = lambda _: None,
) -> tuple[nn.Module, Progress]:
    """Train an ultralytics DetectionModel on the samples of `sampler`; return it averaged, in evaluation mode.

    `closing` replaces the sampler towards the end: samples as in service, after samples as varied as possible.
    Raises TrainingError.
    """
    architecture_of(architecture, "detect")
    if input_size % YOLO_STRIDE_PIXELS:
        raise TrainingError(f"an input of {input_size} pixels is not a multiple of {YOLO_STRIDE_PIXELS}")
    with limited_threads(effort.threads):
        torch.manual_seed(effort.seed)
        descent = Descent(new_detector(architecture, classes), _EMA_DECAY)
        random, step, mean_loss, spent_s = np.random.default_rng(effort.seed), 0, 0.0, 0.0
        progress = Progress(0, 0.0, 0.0, 0.0)
        while (share := effort.share(step, spent_s)) < 1:
            begin_s = time.perf_counter()
            drawn = closing if closing is not None and share > 1 - effort.closing_share else sampler
            samples = [drawn(random) for _ in range(effort.batch)]
            summed = cast("Any", descent.model).loss(collate(samples, len(samples[0][0])))[0].sum()
            loss = descent.step(summed, effort.rate_at(step, share), step + 1) / len(samples)
            if not math.isfinite(loss):
                raise TrainingError(f"the loss is {loss} at step {step}; train with a lower learning rate")
            mean_loss = loss if step == 0 else 0.98 * mean_loss + 0.02 * loss
            step += 1
            _shift_heads(descent.model, share)
            spent_s += time.perf_counter() - begin_s
            progress = Progress(step, effort.share(step, spent_s), mean_loss, spent_s)
            on_progress(progress)  # its time is not counted
    return descent.average, progress


class Descent:
    """AdamW for fine-grained targets, with clipped gradients: decay on matrices only, a short second moment.

    `average` follows the trained weights: quickly at first, then over some thousand steps.
    """

    def __init__(self, model: nn.Module, ema_decay: float) -> None:
        self.model = model.train()
        self.average = copy.deepcopy(model).eval().requires_grad_(False)
        self._ema_decay = ema_decay
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, betas=_BETAS, fused=True)
        followed = zip(self.average.state_dict().values(), model.state_dict().values(), strict=True)
        self._followed = [pair for pair in followed if pair[0].dtype.is_floating_point]

    def step(self, loss: torch.Tensor, rate: float, number: int) -> float:
        """Take step `number`, counted from 1, at this learning rate; return the loss."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRADIENT)
        self.optimiser.step()
        averages, trained = zip(*self._followed, strict=True)
        with torch.no_grad():
            get_ema_multi_avg_fn(min(self._ema_decay, (1 + number) / (10 + number)))(averages, trained, number)
        return float(loss.detach())


def new_detector(architecture: str, classes: Sequence[str]) -> nn.Module:
    """Return an untrained detector with what ultralytics' loss needs."""
    detector = cast("Any", build_original(ARCHITECTURES[architecture], len(classes)))
    from ultralytics.cfg import get_cfg  # silent and offline once a network was built

    detector.args = get_cfg(overrides={"epochs": _EPOCHS})  # the loss reads its gains from here
    detector.names = dict(enumerate(classes))
    return detector.to(memory_format=torch.channels_last).train()


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Give torch `count` threads, and OpenCV one: its own threads would compete for the same cores."""
    torch_threads, opencv_threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(count)
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        cv2.setNumThreads(opencv_threads)


def _shift_heads(model: nn.Module, share: float) -> None:
    """Shift the loss of YOLO26 from one of its two heads to the other as the training proceeds."""
    criterion = cast("Any", model).criterion
    while hasattr(criterion, "updates") and criterion.updates < int(share * _EPOCHS):
        criterion.update()


def collate(samples: Sequence[Sample], size: int) -> dict[str, torch.Tensor]:
    """Return a batch as ultralytics' loss takes it: `img` (B, 3, S, S) in 0..1, boxes as centre and size in 0..1."""
    images = [image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2) for image, _ in samples]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float().div_(255)
    owners = np.concatenate([np.full(len(boxes), index, np.float32) for index, (_, boxes) in enumerate(samples)])
    rows = torch.from_numpy(np.concatenate([boxes for _, boxes in samples]).astype(np.float32).reshape(-1, 5))
    centres, sizes = (rows[:, :2] + rows[:, 2:4]) / 2, rows[:, 2:4] - rows[:, :2]
    return {
        "img": pixels.contiguous(memory_format=torch.channels_last),
        "batch_idx": torch.from_numpy(owners),
        "cls": rows[:, 4:],
        "bboxes": torch.cat((centres, sizes), 1) / size,
    }
