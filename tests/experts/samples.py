"""Experts with random weights for tests: non-trivial batch norms, confident enough to answer something."""

import copy
import functools
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

from experts.spec import ExpertId, ExpertSpec
from experts.stored import thinned
from experts.vision.architectures import ARCHITECTURES, END_TO_END_HEAD, NORMALISATIONS, PLAIN_HEAD, layout_id
from experts.vision.layouts import Layout, build_layout, pack
from experts.vision.networks import adapt, build_original, select_head
from experts.vision.preprocess import to_square
from experts.vision.slot import SlotPool
from experts.weights import write_weights
from tests.experts.pictures import a_busy_picture

torch.set_num_threads(1)


def labels(count: int) -> tuple[str, ...]:
    return tuple(f"label{index}" for index in range(count))


@functools.cache
def _layout(name: str) -> Layout:
    return build_layout(name)


#: The input size at which samples answer sensibly.
CALIBRATED_SIZE = {"classify": 96, "detect": 160}
PICTURES = [a_busy_picture(90, 70, 1), a_busy_picture(50, 200, 2), a_busy_picture(128, 128, 3)]


@functools.cache
def _base_model(architecture: str, class_count: int) -> nn.Module:
    torch.manual_seed(0)
    return build_original(ARCHITECTURES[architecture], class_count)


@functools.cache
def _made_model(architecture: str, class_count: int, seed: int) -> nn.Module:
    model = copy.deepcopy(_base_model(architecture, class_count))
    random = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            module.weight.data.uniform_(0.8, 1.2, generator=random)
            module.bias.data.normal_(0, 0.1, generator=random)
    # Statistics of some images: the signal then reaches the head, and answers vary by place.
    kind_of_network = ARCHITECTURES[architecture]
    mean, std = (torch.tensor(values) for values in NORMALISATIONS[kind_of_network.normalisation])
    size = CALIBRATED_SIZE[kind_of_network.task]
    images = torch.from_numpy(np.stack([to_square(picture, kind_of_network.task, size) for picture in PICTURES]))
    with torch.no_grad():
        model.train()(((images / 255 - mean) / std).permute(0, 3, 1, 2))
    _make_head_unsure(model, random)
    return model.eval()


def _make_head_unsure(model: nn.Module, random: torch.Generator) -> None:
    if isinstance(getattr(model, "fc", None), nn.Linear):
        model.fc.weight.data.normal_(0, 0.4 * model.fc.in_features**-0.5, generator=random)
        return
    for name, spread, bias in (
        ("cv3", 0.2, -1.0),
        ("one2one_cv3", 0.2, -1.0),
        ("cv2", 0.1, 2),
        ("one2one_cv2", 0.1, 2),
    ):
        for branch in getattr(model.model[-1], name, None) or ():
            branch[-1].weight.data.normal_(0, spread, generator=random)
            branch[-1].bias.data.fill_(bias)


def a_model(architecture: str = "resnet18", class_count: int = 5, seed: int = 1) -> nn.Module:
    """The framework's own model with batch norms that matter and answers that are neither sure nor all the same."""
    return copy.deepcopy(_made_model(architecture, class_count, seed))


def an_expert_file(  # noqa: PLR0917  # what tests vary
    folder: Path,
    expert: str = "r18",
    architecture: str = "resnet18",
    class_count: int = 5,
    seed: int = 1,
    input_size: int = 64,
    dtype: str = "float32",
    end_to_end: bool = False,
    stored_as: str = "",
    **fields,
) -> ExpertSpec:
    """A weights file in `folder` and its spec."""
    kind_of_network = ARCHITECTURES[architecture]
    head = END_TO_END_HEAD if end_to_end else PLAIN_HEAD
    name = layout_id(kind_of_network, class_count, input_size, dtype, "channels_last", head)
    model = a_model(architecture, class_count, seed)
    select_head(model, end_to_end=end_to_end)
    layout = _layout(name)
    blocks = pack(layout, adapt(kind_of_network, model, input_size))
    metadata = {
        "architecture": architecture,
        "classes": json.dumps(list(labels(class_count))),
        "input_size": str(input_size),
        "dtype": dtype,
        "memory_format": "channels_last",
        "head": head,
        "layout": name,
        "origin": "a test",
    }
    if stored_as:
        blocks, metadata["stored"] = thinned(blocks, layout.form(stored_as)), stored_as
    file = folder / f"{expert}.safetensors"
    sha256 = write_weights(file, blocks, metadata)
    mean, std = NORMALISATIONS[kind_of_network.normalisation]
    values = {
        "expert": ExpertId(expert),
        "architecture": kind_of_network.name,
        "task": kind_of_network.task,
        "file": file,
        "classes": labels(class_count),
        "input_size": input_size,
        "mean": mean,
        "std": std,
        "sha256": sha256,
        "layout": name,
        "weights_bytes": layout.region_bytes,
        "stored_as": stored_as,
        "stored_bytes": layout.form(stored_as).region_bytes if stored_as else 0,
    }
    return ExpertSpec(**{**values, **fields})


def check_pool(pool: SlotPool) -> None:
    """Assert that the books of a pool without loads under way agree."""
    slots = [*pool._resident.values(), *pool._filling.values(), *pool._kept, *pool._vacant]
    assert len({id(slot.buffer) for slot in slots}) == len(slots), "one buffer serves two slots"
    assert not pool._resident.keys() & pool._filling.keys(), "an expert is resident and loading"
    for expert, slot in pool._resident.items():
        assert slot.spec.expert == expert, f"the slot of {expert} holds {slot.spec.expert}"
        assert slot.buffer.numel() == slot.size_bytes, f"the slot of {expert} has another size"
    assert pool.allocated_bytes <= pool.budget_bytes, "the pool is over its budget"
