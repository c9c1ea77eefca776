"""Features of the demo's training pictures, by which a line can tell a picture that is unlike all of them.

`features.safetensors` beside the weights has for each component `NAME.rows`, (96, 512) float16: a coreset of the
features of its training pictures, defects included; and `NAME.distances`, float32: how far good pictures that no
training saw are from the nearest row, at the quantiles that the file's metadata names.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from experts.durable import replace_durably
from experts.vision.infer import normalise
from experts.vision.preprocess import to_square
from experts.vision.slot import Slot
from tools.demo.pictures import Sample
from tools.training.fit import Variation
from tools.training.head import coreset

FILE = "features.safetensors"
ROWS = 96
QUANTILES = (0.5, 0.9, 0.99, 1.0)
#: Features of the backbone's last layer.
_FEATURES = 512
_BATCH = 16


def features_of(slot: Slot, samples: Sequence[Sample], rng: np.random.Generator | None = None) -> torch.Tensor:
    """Return the features (N, 512) of pictures as they are; with `rng`, of varied copies."""
    rows: list[torch.Tensor] = []
    with torch.inference_mode():
        for start in range(0, len(samples), _BATCH):
            part = samples[start : start + _BATCH]
            squares = np.stack([to_square(s.pixels, "classify", slot.spec.input_size) for s in part])
            if rng is not None:
                lit = Variation()(squares, rng).mul_(255).round_().to(torch.uint8)
                squares = lit.permute(0, 2, 3, 1).contiguous().numpy()
            pixels, layout = torch.from_numpy(squares), slot.layout
            inputs = normalise(pixels, slot.spec, layout.dtype, channels_last=layout.channels_last)
            rows.append(slot.module(inputs)[:, :_FEATURES].clone())
    return torch.cat(rows).clone() if rows else torch.zeros(0, _FEATURES)


def write_features(
    out: Path, backbone: str, learned: Mapping[str, torch.Tensor], good: Mapping[str, torch.Tensor]
) -> None:
    """Write `out/features.safetensors` from each component's features (N, F).

    `learned` are of training pictures, `good` of good ones that no training saw; `backbone` is the sha256 of the
    weights that gave them.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, features in learned.items():
        rows = features[coreset(features[None], min(ROWS, len(features)))[0]].half()
        distances = torch.cdist(good[name], rows.float()).amin(1)
        tensors[f"{name}.rows"] = rows
        tensors[f"{name}.distances"] = distances.quantile(torch.tensor(QUANTILES)) if len(distances) else distances
    metadata = {"backbone": backbone, "quantiles": json.dumps(QUANTILES)}
    replace_durably(out / FILE, save(tensors, metadata))
