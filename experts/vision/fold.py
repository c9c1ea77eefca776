"""Batch norms folded into the convolutions before them, structurally: the same code folds weights and meta shells."""

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

Norm = nn.BatchNorm2d


def fold_batch_norms(module: nn.Module) -> nn.Module:
    """Fold every batch norm in place and return the module. Computed in float64, stored as before.

    A batch norm belongs to the convolution registered just before it, which holds for torchvision's ResNets and
    ultralytics' `Conv`. Raises ValueError if one has no such convolution; that outputs agree is proved at import.
    """
    for parent in list(module.modules()):
        previous: nn.Module | None = None
        for name, child in list(parent.named_children()):
            if isinstance(child, Norm):
                if not isinstance(previous, nn.Conv2d) or previous.out_channels != child.num_features:
                    raise ValueError(
                        f"batch norm {name} of {type(parent).__name__} follows no convolution of its width"
                    )
                _fold_pair(previous, child)
                parent.register_module(name, nn.Identity())
            previous = child
    return module.requires_grad_(requires_grad=False)


def _fold_pair(convolution: nn.Conv2d, norm: Norm) -> None:
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("a batch norm without running statistics cannot be folded; train with them")
    dtype = convolution.weight.dtype
    bias = convolution.bias if convolution.bias is not None else torch.zeros_like(norm.running_mean)
    weight, bias = fuse_conv_bn_weights(
        convolution.weight.detach().double(),
        bias.detach().double(),
        norm.running_mean.double(),
        norm.running_var.double(),
        norm.eps,
        norm.weight.detach().double(),
        norm.bias.detach().double(),
    )
    convolution.weight = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
    convolution.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
