"""The networks that run in slots: frameworks' models with batch norms folded, and a detector's boxes decoded.

`build_original` makes the framework's own model; `adapt` turns such a model (with weights, or on the meta device as a
shell for a slot) into what a slot runs: images (B, 3, S, S) in, class scores or boxes out, always float32.

On CPUs oneDNN adds and activates while it writes a convolution's result, where eager torch reads and writes the whole
result once more for each; names of parameters stay. Measured on the development machine, batches of eight, float32, one
thread: ResNet-18 1.08 times as fast, ResNet-101 1.09, YOLO nanos 1.13 to 1.24; the outputs are the same.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.nn.functional import relu, silu
from torch.nn.utils.fusion import fuse_conv_bn_weights

from experts.vision.architectures import Architecture
from experts.vision.frameworks import torchvision, ultralytics

Activation = Literal["relu", "swish", "none"]


def fold_batch_norms(module: nn.Module) -> nn.Module:
    """Fold every batch norm in place and return the module. Computed in float64, stored as before.

    A batch norm belongs to the convolution registered just before it, as in torchvision's ResNets and ultralytics'
    `Conv`. Raises ValueError if one has no such convolution; the import proves that outputs agree.
    """
    for parent in list(module.modules()):
        previous: nn.Module | None = None
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                if not isinstance(previous, nn.Conv2d) or previous.out_channels != child.num_features:
                    raise ValueError(
                        f"batch norm {name} of {type(parent).__name__} follows no convolution of its width"
                    )
                _fold_pair(previous, child)
                parent.register_module(name, nn.Identity())
            previous = child
    return module.requires_grad_(requires_grad=False)


def _fold_pair(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
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


class FusedConvolution(nn.Conv2d):
    """A convolution and its activation, with the parameters of the convolution that it replaces."""

    def __init__(self, convolution: nn.Conv2d, activation: Activation) -> None:
        super().__init__(
            convolution.in_channels,
            convolution.out_channels,
            cast("tuple[int, int]", convolution.kernel_size),
            cast("tuple[int, int]", convolution.stride),
            cast("Any", convolution.padding),
            cast("tuple[int, int]", convolution.dilation),
            convolution.groups,
            device="meta",
        )
        self.weight, self.bias = convolution.weight, convolution.bias
        self.activation = activation
        #: The weights in oneDNN's blocks, if this network was packed.
        self.packed: torch.Tensor | None = None
        #: Of the first batch; None before it.
        self.input_shape: torch.Size | None = None

    def forward(self, input: torch.Tensor, shortcut: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002  # torch's name
        """Return the activated convolution, or relu(convolution + shortcut), as a residual block ends."""
        if self.input_shape is None:
            self.input_shape = input.shape
        fuses = input.device.type == "cpu" and runs_fused(input.dtype)
        if shortcut is not None:
            if fuses and self.groups == 1:  # torch has no kernel for grouped ones in bfloat16
                return _pointwise("binary")(input, shortcut, *self._arguments(), "add", 1.0, "relu", [], "")
            return relu(self(input) + shortcut, inplace=True)
        if fuses:
            return _pointwise("default")(input, *self._arguments(), self.activation, [], "")
        output = super().forward(input)
        if self.activation == "none":
            return output
        return relu(output, inplace=True) if self.activation == "relu" else silu(output, inplace=True)

    def pack(self) -> None:
        """Keep the weights in the blocks that the kernel reads for the first batch's inputs, of any batch size."""
        window = (self.padding, self.stride, self.dilation, self.groups)
        self.packed = torch.ops.mkldnn._reorder_convolution_weight(self.weight, *window, self.input_shape)

    def _arguments(self) -> tuple[Any, ...]:
        weight = self.weight if self.packed is None else self.packed
        return weight, self.bias, self.padding, self.stride, self.dilation, self.groups


class ResidualBlock(nn.Module):
    """A block of a torchvision ResNet with folded batch norms: two convolutions, or three (bottleneck)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # The order of registration is the order of the tensors in weights files.
        names = [name for name in ("conv1", "conv2", "conv3") if hasattr(block, name)]
        for name in names:
            last = name == names[-1]
            self.register_module(name, FusedConvolution(getattr(block, name), "none" if last else "relu"))
        self.downsample = cast("nn.Sequential | None", block.downsample)
        self._names = tuple(names)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        *first, last = (cast("FusedConvolution", getattr(self, name)) for name in self._names)
        output = images
        for convolution in first:
            output = convolution(output)
        return last(output, images if self.downsample is None else self.downsample(images))


def fuse_residual_blocks(network: nn.Module) -> None:
    """Fuse a torchvision ResNet with folded batch norms, in place."""
    blocks = torchvision().models.resnet
    for stage in (network.layer1, network.layer2, network.layer3, network.layer4):
        for name, block in list(cast("nn.Module", stage).named_children()):
            if isinstance(block, (blocks.BasicBlock, blocks.Bottleneck)):
                cast("nn.Module", stage).register_module(name, ResidualBlock(block))
    network.conv1 = FusedConvolution(cast("nn.Conv2d", network.conv1), "relu")
    network.relu = nn.Identity()


def fuse_activations(module: nn.Module) -> None:
    """Fuse every `Conv` of ultralytics (convolution, folded batch norm, SiLU), in place."""
    for part in module.modules():
        convolution, activation = getattr(part, "conv", None), getattr(part, "act", None)
        if type(convolution) is nn.Conv2d and type(activation) is nn.SiLU:
            part.conv, part.act = FusedConvolution(convolution, "swish"), nn.Identity()
            part.forward = part.conv.forward  # a YOLO nano has so many that calls of identities take measurable time


def fuse_remaining(module: nn.Module) -> None:
    """Replace every other convolution, in place: without an activation, but its weights can be packed."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if type(child) is nn.Conv2d:
                part.register_module(name, FusedConvolution(child, "none"))


@functools.cache
def runs_fused(dtype: torch.dtype) -> bool:
    """Return True if this build of torch and this processor have fused convolutions of this type."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_convolution_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # no public name for it
    return dtype == torch.float32


@functools.cache
def _pointwise(overload: str) -> Any:
    """Return one overload of the fused convolution, so that torch does not search for it in every call."""
    return getattr(torch.ops.mkldnn._convolution_pointwise, overload)  # torch's compiler calls it by this name, too


#: Boxes an end-to-end head picks before the confidence floor, as ultralytics' `Detect.max_det`.
END_TO_END_BOXES = 300


class Classifier(nn.Module):
    """A torchvision ResNet; returns (B, head rows) float32 logits, padding rows included."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images).float()


class Backbone(nn.Module):
    """A torchvision ResNet without its last layer; returns (B, F) float32 features, for heads (heads.py).

    First those of its last layer, then the map before the last block, (channels, height, width) flattened.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        network.fc = nn.Identity()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        network = cast("Any", self.network)
        early = network.layer1(network.maxpool(network.relu(network.bn1(network.conv1(images)))))
        late = network.layer3(network.layer2(early))
        return torch.cat((network.layer4(late).mean((2, 3)), late.flatten(1)), 1).float()


class Detector(nn.Module):
    """An ultralytics detection model without its training parts; answers are decoded in float32.

    One-to-many heads give (B, 4 + classes, anchors): x1 y1 x2 y2 in input pixels, then a score per class. End-to-end
    heads give (B, boxes, 6): x1 y1 x2 y2 score class. A forward pass changes nothing (the framework's own head caches
    its anchors), so threads may share a slot.
    """

    anchors: torch.Tensor
    strides: torch.Tensor

    def __init__(self, network: nn.Module, input_size: int) -> None:
        super().__init__()
        layers = cast("Any", network).model
        head = layers[-1]
        self.layers = nn.ModuleList(list(layers)[:-1])
        self.sources: list[int | list[int]] = [layer.f for layer in layers]
        self.kept: frozenset[int] = frozenset(cast("Any", network).save)
        self.end_to_end = is_end_to_end(network)
        self.box_head: nn.ModuleList = head.one2one_cv2 if self.end_to_end else head.cv2
        self.class_head: nn.ModuleList = head.one2one_cv3 if self.end_to_end else head.cv3
        self.bins = int(head.reg_max)
        anchors, strides = make_anchors([float(stride) for stride in head.stride], input_size)
        # Not of the expert but of its layout, so not in weights files.
        self.register_buffer("anchors", anchors, persistent=False)
        self.register_buffer("strides", strides, persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        boxes, scores = self._head(self._features(images))
        boxes, scores = self._decode(boxes.float()), scores.float().sigmoid()
        return _pick_end_to_end(boxes, scores) if self.end_to_end else torch.cat((boxes, scores), 1)

    def _features(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Run the graph of ultralytics: each layer names where its input comes from, -1 being the layer before."""
        outputs: list[torch.Tensor | None] = []
        current: Any = images
        for index, source in enumerate(self.sources):
            if source != -1:
                current = (
                    outputs[source]
                    if isinstance(source, int)
                    else [current if place == -1 else outputs[place] for place in source]
                )
            if index == len(self.layers):
                break
            current = self.layers[index](current)
            outputs.append(current if index in self.kept else None)
        return current

    def _head(self, features: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        boxes = [head(level).flatten(2) for head, level in zip(self.box_head, features, strict=True)]
        scores = [head(level).flatten(2) for head, level in zip(self.class_head, features, strict=True)]
        return torch.cat(boxes, 2), torch.cat(scores, 2)

    def _decode(self, sides: torch.Tensor) -> torch.Tensor:
        """(B, 4 * bins, A) distances, or distributions of them (arXiv 2006.04388), to (B, 4, A) corners in pixels."""
        if self.bins > 1:
            batch, _, anchors = sides.shape
            bins = torch.arange(self.bins, dtype=torch.float32, device=sides.device).view(1, 1, -1, 1)
            sides = (sides.view(batch, 4, self.bins, anchors).softmax(2) * bins).sum(2)
        left_top, right_bottom = sides.chunk(2, 1)
        return torch.cat((self.anchors - left_top, self.anchors + right_bottom), 1) * self.strides


def make_anchors(strides: Sequence[float], input_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cell centres (2, A) in cells, x then y, and strides (1, A) in pixels, of all levels; CPU, float32."""
    centres: list[torch.Tensor] = []
    widths: list[torch.Tensor] = []
    for stride in strides:
        side = torch.arange(input_size // int(stride), dtype=torch.float32, device="cpu") + 0.5
        y, x = torch.meshgrid(side, side, indexing="ij")
        centres.append(torch.stack((x.flatten(), y.flatten())))
        widths.append(torch.full((1, side.numel() ** 2), stride, dtype=torch.float32, device="cpu"))
    return torch.cat(centres, 1), torch.cat(widths, 1)


def _pick_end_to_end(boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Pick the best (box, class) pairs as ultralytics' `Detect.postprocess`: boxes first, then pairs of their classes.

    boxes: (B, 4, A); scores: (B, classes, A). Returns (B, min(300, A), 6).
    """
    boxes, scores = boxes.transpose(1, 2), scores.transpose(1, 2)
    count, classes = min(END_TO_END_BOXES, scores.shape[1]), scores.shape[2]
    anchors = scores.amax(2).topk(count, dim=1).indices
    scores = scores.gather(1, anchors[..., None].expand(-1, -1, classes))
    best, pairs = scores.flatten(1).topk(count, dim=1)
    places = anchors.gather(1, pairs // classes)
    picked = boxes.gather(1, places[..., None].expand(-1, -1, 4))
    return torch.cat((picked, best[..., None], (pairs % classes)[..., None].float()), 2)


@dataclass(frozen=True, slots=True)
class Family:
    """Networks of one framework: how its own model is built with random weights and adapted to a slot.

    `runs_on_meta`: a model can be built on the meta device, without memory for weights.
    """

    build: Callable[[Architecture, int], nn.Module]
    adapt: Callable[[nn.Module, int], Classifier | Detector]
    runs_on_meta: bool


def _build_torchvision(architecture: Architecture, rows: int) -> nn.Module:
    return torchvision().models.get_model(architecture.source, weights=None, num_classes=rows)


def _adapt_resnet(network: nn.Module, _input_size: int) -> Classifier:
    return _fused(Classifier(network))


R = TypeVar("R", Classifier, Backbone)


def _fused(resnet: R) -> R:
    fold_batch_norms(resnet)
    fuse_residual_blocks(resnet.network)
    fuse_remaining(resnet)
    return resnet


def adapt_backbone(original: nn.Module) -> Backbone:
    """Return what a slot runs for the heads of a torchvision ResNet, which stays as it was."""
    return _fused(Backbone(copy.deepcopy(original).eval()))


def build_backbone_shell(architecture: Architecture) -> Backbone:
    with torch.device("meta"):
        return adapt_backbone(build_original(architecture, 1))


def _build_ultralytics(architecture: Architecture, rows: int) -> nn.Module:
    ultralytics()
    from ultralytics.nn.tasks import DetectionModel  # noqa: PLC0415  # only after its settings were made

    return DetectionModel(architecture.source, nc=rows, verbose=False)


def weight_shapes(source: str) -> dict[str, torch.Size]:
    """Return the names and shapes of a framework's own model, by `Architecture.source`, without memory for weights."""
    with torch.device("meta"):
        if not source.endswith(".yaml"):
            network = torchvision().models.get_model(source, weights=None)
        else:  # the whole model measures its strides, which the meta device cannot answer
            ultralytics()
            from ultralytics.nn.tasks import parse_model, yaml_model_load  # noqa: PLC0415  # only after its settings

            layers, _ = parse_model(yaml_model_load(source), 3, verbose=False)
            network = nn.ModuleDict({"model": layers})
    return {name: tensor.shape for name, tensor in network.state_dict().items()}


def _adapt_yolo(network: nn.Module, input_size: int) -> Detector:
    detector = Detector(network, input_size)
    fold_batch_norms(detector)
    fuse_activations(detector)
    fuse_remaining(detector)
    return detector


#: By `Architecture.family`. Another family needs an entry here and its architectures in architectures.py.
FAMILIES: Mapping[str, Family] = {
    "resnet": Family(_build_torchvision, _adapt_resnet, runs_on_meta=True),
    # ultralytics measures a model's strides by running it, which the meta device cannot answer.
    "yolo": Family(_build_ultralytics, _adapt_yolo, runs_on_meta=False),
}


def build_original(architecture: Architecture, rows: int) -> nn.Module:
    """Return the framework's own model with random weights, in evaluation mode, on torch's default device."""
    return FAMILIES[architecture.family].build(architecture, rows).eval()


def adapt(architecture: Architecture, original: nn.Module, input_size: int) -> Classifier | Detector:
    """Return what a slot runs, made from a framework's model, which stays as it was."""
    return FAMILIES[architecture.family].adapt(copy.deepcopy(original).eval(), input_size)


def select_head(original: nn.Module, *, end_to_end: bool) -> None:
    """Make a YOLO of two heads answer with one of them, against ultralytics' default if need be."""
    if hasattr(original, "end2end") and cast("Any", original).end2end != end_to_end:
        cast("Any", original).end2end = end_to_end


def is_end_to_end(original: nn.Module) -> bool:
    return bool(getattr(original, "end2end", False))


def build_shell(architecture: Architecture, rows: int, input_size: int, *, end_to_end: bool) -> Classifier | Detector:
    """Return the adapted network with its parameters on the meta device."""
    if FAMILIES[architecture.family].runs_on_meta:
        with torch.device("meta"):
            return adapt(architecture, build_original(architecture, rows), input_size)
    original = build_original(architecture, rows)
    select_head(original, end_to_end=end_to_end)
    shell = adapt(architecture, original, input_size)
    for module in shell.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    return shell
