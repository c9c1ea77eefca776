"""Fused convolutions answer as the separate operations do, and weigh and order their parameters as before."""

import pytest
import torch

from experts.vision.architectures import ARCHITECTURES, layout_id
from experts.vision.layouts import build_layout
from experts.vision.networks import FusedConvolution, ResidualBlock, build_original


@pytest.mark.parametrize(("architecture", "names"), [("resnet18", 2), ("resnet50", 3)])
def test_blocks_of_a_slot_are_fused_and_their_tensors_keep_name_and_order(architecture: str, names: int):
    network = ARCHITECTURES[architecture]
    layout = build_layout(layout_id(network, 3, 64, "float32", "channels_last"))
    assert any(isinstance(part, ResidualBlock) for part in layout.shell.modules())
    with torch.device("meta"):
        original = build_original(network, 16)
    expected = [name for name, _ in original.named_parameters() if ".bn" not in name and "downsample.1" not in name]
    weights = [name for name in expected if name.endswith("weight") and not name.startswith("bn")]
    assert [entry.name.removeprefix("network.") for entry in layout.entries if entry.name.endswith("weight")] == weights
    block = layout.shell.get_submodule("network.layer1.0")
    assert sum(isinstance(part, FusedConvolution) for part in block.children()) == names
