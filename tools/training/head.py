"""Trains heads on a backbone's features: scores per label, or a bank of what good pictures look like."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from experts.catalog import CatalogEntry
from experts.vision.architectures import ARCHITECTURES
from experts.vision.heads import patches_of
from experts.weights import Block, write_weights
from tools.training import TrainingError
from tools.training.expert_file import entry_of, header_of

#: Weight decay of a linear head, on features divided by their spread and the root of their number.
_DECAY = 1e-3
_STEPS = 100
#: Approximate bytes of a bank's file; limits of the patches for each place, of which it has as many as fit.
_BANK_BYTES, _LEAST_PATCHES, _MOST_PATCHES = 1_000_000, 8, 64
#: Without defective pictures: the standard deviations above the good ones' distance at which an image is not good.
_UNUSUAL = 3.0
#: A feature that hardly varied in training counts as if it varied by this share of the others' spread.
_LEAST_SPREAD = 0.2
#: Standard deviations of a distance's logarithm beyond which are about one of a thousand good pictures; how many more
#: if one was measured; and the least deviation.
_FAR, _FEW, _LEAST_DEVIATION = 3.2, 15.0, 0.1


def fit_linear(features: torch.Tensor, targets: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
    """Return `weight` (classes, F) and `bias` of a logistic regression on features (N, F); labels weigh the same."""
    mean, spread = features.mean(0), features.std(0)
    scale = 1 / ((spread + 1e-3 * features.std() + 1e-6) * features.shape[1] ** 0.5)
    inputs = (features - mean) * scale
    weight = torch.zeros(classes, features.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    counts = torch.bincount(targets, minlength=classes).clamp_min(1)
    weighing = len(targets) / classes / counts
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = functional.cross_entropy(functional.linear(inputs, weight, bias), targets, weight=weighing)
        value = value + _DECAY * weight.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    with torch.no_grad():
        folded = weight * scale
        return {"weight": folded, "bias": bias - folded @ mean}


def fit_usual(features: torch.Tensor, channels: int) -> torch.Tensor:
    """Return `usual` (LinearHead) of good pictures' features (N, F), whose map has `channels`."""
    patches = patches_of(features, (features.shape[1] - 2 * channels) // channels, channels)
    mean, spread = patches.mean(1), patches.std(1, unbiased=False)
    return torch.stack((mean, 1 / (spread + _LEAST_SPREAD * spread.mean() + 1e-6)))


def distance_limit(distances: torch.Tensor) -> float:
    """Return the distance from usual patches beyond which a picture is unlike training.

    `distances` (N,) are those of good pictures that `usual` was not fitted on.
    """
    logs = distances.clamp_min(1e-6).log()
    far = (_FAR + _FEW / len(logs)) * max(float(logs.std(unbiased=False)), _LEAST_DEVIATION)
    return round(math.exp(float(logs.mean()) + far), 3)


def fit_bank(features: torch.Tensor, channels: int) -> dict[str, torch.Tensor]:
    """Return `bank` and `scale` (BankHead) of good pictures' features (N, F), whose map has `channels`.

    The bank keeps a coreset of each place's patches.
    """
    places = (features.shape[1] - 2 * channels) // channels
    patches = patches_of(features, places, channels)
    scale = patches.std((0, 1)) + 1e-5
    patches = patches / scale
    count = min(max(_BANK_BYTES // (4 * places * channels), _LEAST_PATCHES), _MOST_PATCHES, patches.shape[1])
    chosen = coreset(patches, count)
    return {"bank": patches.gather(1, chosen[..., None].expand(-1, -1, channels)), "scale": scale}


def coreset(points: torch.Tensor, count: int) -> torch.Tensor:
    """Return the rows (B, count) that stand for the points (B, N, F) of each of B spaces.

    Each new one is the point that is farthest from those chosen before.
    """
    chosen = torch.zeros(len(points), count, dtype=torch.int64)
    nearest = torch.full(points.shape[:2], torch.inf)
    spaces = torch.arange(len(points))
    for number in range(count):
        if number:
            chosen[:, number] = nearest.argmax(1)
        newest = points[spaces, chosen[:, number]]
        nearest = torch.minimum(nearest, (points - newest[:, None]).square().sum(2))
    return chosen


def bank_odds(distances: torch.Tensor, is_bad: torch.Tensor, bad: int) -> torch.Tensor:
    """Return `odds` of a BankHead from the distances (N,) of pictures that the bank does not hold."""
    good = distances[~is_bad]
    deviation = float(good.std(unbiased=False)) + 1e-6
    centre, spread = float(good.mean()) + _UNUSUAL * deviation, deviation
    if bool(is_bad.any()):
        line = fit_linear(distances[:, None], is_bad.long(), 2)
        slope = float(line["weight"][1] - line["weight"][0])
        if slope > 0:
            centre, spread = float(line["bias"][0] - line["bias"][1]) / slope, 1 / slope
    return torch.tensor([centre, spread, float(bad)])


def write_head(
    kind: str,
    tensors: dict[str, torch.Tensor],
    backbone: CatalogEntry,
    classes: Sequence[str],
    out: Path,
    *,
    expert: str,
    origin: str,
) -> dict[str, Any]:
    architecture, size = ARCHITECTURES[backbone.architecture], backbone.input_size
    metadata = header_of(architecture, classes, size, ("float32", "contiguous", kind), origin)
    metadata["backbone"] = backbone.sha256
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise TrainingError(f"{expert}: the training gave weights that are not finite numbers; use other pictures")
    blocks = [
        Block(name, "F32", tuple(tensor.shape), tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        for name, tensor in tensors.items()
    ]
    file = out / f"{expert}.safetensors"
    entry = entry_of(architecture, classes, size, file, write_weights(file, blocks, metadata))
    return entry | {"backbone": {"file": backbone.file, "sha256": backbone.sha256}}
