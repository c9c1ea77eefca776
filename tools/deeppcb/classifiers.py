"""ResNet-18s that say whether a tile is clean or suspect: one for all patterns, then one for each pattern from it.

"Is there a defect of fifteen pixels anywhere on 640 x 640" is hard to learn from one bit per tile, and a ResNet's head
averages over the whole tile. But the head is linear, so the average of what it says of each 32-pixel cell is what it
says of the tile, and boxes tell for each cell whether a defect is in it. So cells are trained: each gives evidence
e >= 0, the probability that it is clean is exp(-e), and that of the tile exp(-sum of e), a noisy-or. The sum, against a
threshold, is exactly a ResNet's own average and last layer.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from experts.vision.architectures import ARCHITECTURES, NORMALISATIONS
from experts.vision.networks import build_original
from tools.deeppcb.crops import cut_window, draw_defects, fade, turn
from tools.deeppcb.synthetic import Rng, Shapes
from tools.deeppcb.tiles import Boxes, Pair, Tile

ARCHITECTURE, INPUT_SIZE = "resnet18", 320
#: Of a ResNet's last layer, in pixels of the input.
_CELL_PIXELS = 32
_CELLS = INPUT_SIZE // _CELL_PIXELS
#: Windows of this many cells a side come first: cheaper steps, so more of them; whole tiles after.
_WINDOW_CELLS, _WINDOW_SHARE = 5, 0.6
_LEARNING_RATE, _WEIGHT_DECAY, _WARM_UP_STEPS = 1e-3, 0.02, 50
#: Evidence under this is as good as none; it keeps the logarithm finite.
_LEAST_EVIDENCE = 1e-3
_CLEAN_CELL, _DEFECT_CELL, _UNSURE_CELL = 0, 1, 2
#: How steeply the answer turns from clean to suspect around the threshold, per unit of evidence.
_STEEPNESS = 4.0
_THRESHOLD_BOUNDS = (0.1, 3.0)

OnShare = Callable[[float], None]
Example = tuple[Tile, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class TileSampler:
    """Windows of `cells` x `cells` cells at the input's scale, and for each cell whether a defect is in it.

    Half of them are of tested tiles; on half of all some defects are drawn, so that templates come clean and not.
    """

    pairs: Sequence[Pair]
    shapes: Shapes
    cells: int = _CELLS

    def __call__(self, rng: Rng) -> Example:
        pair = self.pairs[int(rng.integers(len(self.pairs)))]
        tested = rng.random() < 0.5
        tile, boxes = (pair.test, pair.boxes) if tested else (pair.template, pair.boxes[:0])
        scale = tile.shape[0] / INPUT_SIZE * (rng.uniform(0.92, 1.08) if rng.random() < 0.5 else 1.0)
        side = self.cells * _CELL_PIXELS
        window = min(*tile.shape, round(side * scale))
        tile, boxes = cut_window(tile, boxes, window, rng)
        if rng.random() < 0.5:
            boxes = draw_defects(tile, boxes, int(rng.poisson(1 + self.cells / 4)), self.shapes, rng)
        tile, boxes = turn(tile, boxes, rng)
        tile = np.asarray(cv2.resize(fade(tile, rng), (side, side), interpolation=cv2.INTER_AREA), np.uint8)
        return tile, mark_cells(boxes, window, self.cells)


def mark_cells(boxes: Boxes, window: int, cells: int) -> NDArray[np.uint8]:
    """(cells, cells): 1 where a box has its centre, 2 (not asked for) where only a part of it lies, else 0."""
    marks = np.full((cells, cells), _CLEAN_CELL, np.uint8)
    corners = boxes[:, :4] * cells / window
    for x1, y1, x2, y2 in corners:
        marks[int(y1) : math.ceil(y2), int(x1) : math.ceil(x2)] = _UNSURE_CELL
    centres = ((corners[:, :2] + corners[:, 2:]) / 2).clip(0, cells - 1e-3).astype(int)
    marks[centres[:, 1], centres[:, 0]] = _DEFECT_CELL
    return marks


class Locator(nn.Module):
    """A ResNet up to its last block, and the evidence for a defect that each of its cells gives.

    The weights of the evidence are kept at zero or above: only then does a cell without a defect give none at all,
    instead of some that another cell takes away. `hint` is a plain logit per cell that helps the features along.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        parts = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3")
        self.early = nn.Sequential(*(getattr(network, part) for part in parts))
        self.late = cast("nn.Module", network.layer4)
        channels = cast("Any", network).fc.in_features
        self.weights = nn.Parameter(torch.full((channels,), 1 / channels))
        self.hint = nn.Conv2d(channels, 1, 1)

    def judge(self, early: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From `early` features to evidence and hints: (B, h, w) each."""
        features = self.late(early)
        return (features * self.weights[:, None, None]).sum(1), self.hint(features)[:, 0]

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.judge(self.early(images))


def train_for_all(
    pairs: Sequence[Pair], shapes: Shapes, minutes: float, seed: int, on_share: OnShare = lambda _: None
) -> Locator:
    """The network of the catch-all classifier, from random weights: windows first, then whole tiles."""
    torch.manual_seed(seed)
    network = build_original(ARCHITECTURES[ARCHITECTURE], 2)
    locator: Locator = cast("Any", Locator(network)).to(memory_format=torch.channels_last)
    rng = np.random.default_rng(seed)
    windows, tiles = TileSampler(pairs, shapes, _WINDOW_CELLS), TileSampler(pairs, shapes)

    def examples(share: float) -> tuple[torch.Tensor, torch.Tensor]:
        sampler, batch = (windows, 12) if share < _WINDOW_SHARE else (tiles, 4)
        images, marks = _stack([sampler(rng) for _ in range(batch)])
        return locator.early(images), marks

    _train(locator, examples, list(locator.parameters()), minutes, on_share, _LEARNING_RATE)
    return locator


def train_for_pattern(shared: Locator, pairs: Sequence[Pair], shapes: Shapes, minutes: float, seed: int) -> Locator:
    """A network of its own for one pattern: the early layers are the shared one's, the last block goes on learning.

    Early layers do not change, so their features are made once, in a third of the time.
    """
    locator = copy.deepcopy(shared).eval()
    rng = np.random.default_rng(seed)
    sampler = TileSampler(pairs, shapes)
    end_s = time.perf_counter() + minutes * 60 / 3
    features: list[torch.Tensor] = []
    marks: list[torch.Tensor] = []
    with torch.no_grad():
        while len(features) < 4 or (time.perf_counter() < end_s and len(features) < 4 * len(pairs)):
            images, some = _stack([sampler(rng) for _ in range(2)])
            features.append(locator.early(images))
            marks.append(some)
    known, wanted = torch.cat(features), torch.cat(marks)
    for module in locator.late.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.02  # few tiles: stay near the shared statistics

    def examples(_: float) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.from_numpy(rng.choice(len(known), min(6, len(known)), replace=False))
        return known[chosen], wanted[chosen]

    trained = [*locator.late.parameters(), *locator.hint.parameters(), locator.weights]
    _train(locator, examples, trained, minutes * 2 / 3, lambda _: None, _LEARNING_RATE / 3)
    return locator


def _train(
    locator: Locator,
    examples: Callable[[float], tuple[torch.Tensor, torch.Tensor]],
    trained: list[nn.Parameter],
    minutes: float,
    on_share: OnShare,
    learning_rate: float,
) -> None:
    """AdamW under a cosine over the minutes; at least two steps. The early layers are the caller's to set to train."""
    if any(parameter is locator.early[0].weight for parameter in trained):
        locator.early.train()
    locator.late.train()
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=_WEIGHT_DECAY)
    begin_s, step, share = time.perf_counter(), 0, 0.0
    while share < 1 or step < 2:
        rate = learning_rate * min(1, (step + 1) / _WARM_UP_STEPS) * (0.02 + 0.49 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        early, marks = examples(share)
        evidence, hints = locator.judge(early)
        optimizer.zero_grad()
        cell_loss(evidence, hints, marks).backward()
        nn.utils.clip_grad_norm_(trained, 5.0)
        optimizer.step()
        with torch.no_grad():
            locator.weights.clamp_(min=0)
        step += 1
        share = min((time.perf_counter() - begin_s) / (minutes * 60), 1.0)
        on_share(share)
    locator.eval()


def cell_loss(evidence: torch.Tensor, hints: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """The negative log likelihood of what is known of the cells, per image, and of the hints beside it."""
    clean, defect = marks == _CLEAN_CELL, marks == _DEFECT_CELL
    missed = -torch.log(-torch.expm1(-(evidence[defect] + _LEAST_EVIDENCE)))
    likelihood = (evidence[clean].sum() + missed.sum()) / len(marks)
    known = marks != _UNSURE_CELL
    target = defect[known].float()
    hint = functional.binary_cross_entropy_with_logits(hints[known], target, pos_weight=torch.tensor(4.0))
    return likelihood / math.prod(marks.shape[1:]) * 25 + 2 * hint


def evidence_of(locator: Locator, tiles: Sequence[Tile]) -> NDArray[np.float64]:
    """The sum over each tile's cells: what decides between clean and suspect."""
    found: list[float] = []
    with torch.inference_mode():
        for tile in tiles:
            square = np.asarray(cv2.resize(tile, (INPUT_SIZE, INPUT_SIZE), interpolation=cv2.INTER_AREA), np.uint8)
            images, _ = _stack([(square, np.zeros((_CELLS, _CELLS), np.uint8))])
            found.append(float(locator(images)[0].sum()))
    return np.array(found)


def choose_evidence(clean: NDArray[np.float64], suspect: NDArray[np.float64]) -> float:
    """The threshold that errs least on held-out tiles, a suspect one that passes counting double.

    Between equally good ones the middle in proportion: evidence is spread over orders of magnitude.
    """
    candidates = np.geomspace(*_THRESHOLD_BOUNDS, 200)
    errors = [(clean >= at).sum() + 2 * (suspect < at).sum() for at in candidates]
    best = candidates[np.array(errors) == min(errors)]
    return float(best[len(best) // 2])


def as_resnet(locator: Locator, threshold: float) -> dict[str, torch.Tensor]:
    """The state of a torchvision ResNet-18 with the classes clean and suspect that judges as `locator` does."""
    network = cast("Any", build_original(ARCHITECTURES[ARCHITECTURE], 2))
    names = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3")
    for name, part in zip(names, locator.early, strict=True):
        getattr(network, name).load_state_dict(part.state_dict())
    network.layer4.load_state_dict(locator.late.state_dict())
    sides = torch.tensor([-0.5, 0.5]) * _STEEPNESS
    with torch.no_grad():
        # The network averages over cells where evidence is summed.
        network.fc.weight.copy_(sides[:, None] * locator.weights * _CELLS**2)
        network.fc.bias.copy_(-sides * threshold)
    return network.state_dict()


def _stack(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, 3, S, S) normalised, and the marks."""
    mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in NORMALISATIONS["imagenet"])
    grey = torch.from_numpy(np.stack([tile for tile, _ in examples])).float().div_(255)[:, None]
    images = grey.expand(-1, 3, -1, -1).sub(mean).div_(deviation)
    marks = torch.from_numpy(np.stack([marks for _, marks in examples]))
    return images.contiguous(memory_format=torch.channels_last), marks
