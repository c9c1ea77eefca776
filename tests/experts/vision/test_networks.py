"""Fused convolutions answer as the separate operations do, and weigh and order their parameters as before."""

import pytest
import torch
from torch import nn
from torch.nn.functional import relu, silu

from experts.vision.architectures import ARCHITECTURES, layout_id
from experts.vision.layouts import build_layout
from experts.vision.networks import FusedConvolution, ResidualBlock, build_original


def a_convolution(groups: int = 1) -> nn.Conv2d:
    torch.manual_seed(3)
    return nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=groups).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 8])
def test_a_convolution_and_its_activation_are_what_they_were_apart(dtype: torch.dtype, groups: int):
    plain = a_convolution(groups).to(dtype)
    images = torch.randn(2, 8, 12, 10, dtype=dtype).contiguous(memory_format=torch.channels_last)
    shortcut = torch.randn(2, 16, 6, 5, dtype=dtype)
    with torch.inference_mode():
        close = {"atol": 0.05, "rtol": 0.05} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
        torch.testing.assert_close(FusedConvolution(plain, "none")(images), plain(images), **close)
        torch.testing.assert_close(FusedConvolution(plain, "relu")(images), relu(plain(images)), **close)
        torch.testing.assert_close(FusedConvolution(plain, "swish")(images), silu(plain(images)), **close)
        added = FusedConvolution(plain, "none")(images, shortcut)
        torch.testing.assert_close(added, relu(plain(images) + shortcut), **close)


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
