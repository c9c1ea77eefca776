"""Slot layouts: the order, shapes and offsets of an expert's tensors, and modules whose parameters are views.

Convolution weights are stored as (out, height, width, in), so that views of the bytes are what the kernels want;
everything else is stored as it is.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from experts.spec import LayoutId
from experts.stored import StoredForm, plan_form
from experts.vision.architectures import ARCHITECTURES, CHANNELS_LAST, END_TO_END_HEAD, FEATURES, Architecture
from experts.vision.graphs import GraphedNetwork, Recorders, Recordings
from experts.vision.heads import Heads
from experts.vision.networks import Backbone, Classifier, Detector, build_backbone_shell, build_shell
from experts.weights import FILE_DTYPES, Block, Entry, plan_entries

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_HEAD = ("network.fc.weight", "network.fc.bias")


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout and the shell its modules are copied from. `entries` say where each parameter lies in a slot."""

    layout: LayoutId
    architecture: Architecture
    head_rows: int
    dtype: torch.dtype
    shell: Backbone | Classifier | Detector
    entries: tuple[Entry, ...]
    region_bytes: int
    recorders: Recorders = field(default_factory=Recorders, repr=False, compare=False)
    #: The heads of backbones of this layout.
    heads: Heads = field(default_factory=Heads, repr=False, compare=False)
    _recordings: dict[torch.device, Recordings | None] = field(default_factory=dict, repr=False, compare=False)
    _forms: dict[str, StoredForm] = field(default_factory=dict, repr=False, compare=False)

    def form(self, stored_as: str) -> StoredForm:
        """Return how files of a stored form fill slots of this layout."""
        if stored_as not in self._forms:
            self._forms[stored_as] = plan_form(self.entries, self.region_bytes, stored_as)
        return self._forms[stored_as]

    @property
    def end_to_end(self) -> bool:
        return isinstance(self.shell, Detector) and self.shell.end_to_end

    def bind(self, buffer: torch.Tensor) -> nn.Module:
        """Make a module whose parameters are views into `buffer`: (region_bytes,) uint8 on the slot's device."""
        module = copy.deepcopy(self.shell)
        for entry in self.entries:
            stored = buffer[entry.begin : entry.end].view(self.dtype).view(entry.shape)
            view = stored.permute(0, 3, 1, 2) if stored.dim() == 4 else stored
            owner, _, name = entry.name.rpartition(".")
            setattr(module.get_submodule(owner), name, nn.Parameter(view, requires_grad=False))
        for submodule in module.modules():
            for name, constant in submodule.named_buffers(recurse=False):
                setattr(submodule, name, constant.to(buffer.device))
        module.eval()
        recordings = self._recordings.setdefault(buffer.device, self.recorders.recordings(buffer.device))
        return module if recordings is None else GraphedNetwork(module, recordings)


def build_layout(layout: LayoutId, recorders: Recorders | None = None) -> Layout:
    """Build a layout from its name, in up to a second for the largest YOLO; layouts may share `recorders`."""
    name, rows, input_size, dtype, memory_format, head = layout.split("-")
    if memory_format != CHANNELS_LAST:
        raise ValueError(f"no network is stored as {memory_format}")
    architecture = ARCHITECTURES[name]
    if head == FEATURES:
        shell: Backbone | Classifier | Detector = build_backbone_shell(architecture)
    else:
        shell = build_shell(architecture, int(rows), int(input_size), end_to_end=head == END_TO_END_HEAD)
    shapes = [
        (parameter_name, FILE_DTYPES[dtype], _stored_shape(tuple(parameter.shape)))
        for parameter_name, parameter in shell.named_parameters()
    ]
    entries, region_bytes = plan_entries(shapes)
    return Layout(
        layout=layout,
        architecture=architecture,
        head_rows=int(rows),
        dtype=TORCH_DTYPES[dtype],
        shell=shell,
        entries=entries,
        region_bytes=region_bytes,
        recorders=recorders or Recorders(),
    )


def pack(layout: Layout, adapted: nn.Module) -> list[Block]:
    """Return an adapted network's weights in the order and form of its layout. Raises ValueError if they do not fit."""
    parameters = dict(adapted.named_parameters())
    blocks: list[Block] = []
    for entry in layout.entries:
        parameter = parameters.pop(entry.name, None)
        if parameter is None:
            raise ValueError(f"the model has no tensor {entry.name}; is it a {layout.architecture.name}?")
        tensor = parameter.detach().to("cpu", layout.dtype)
        if entry.name in _HEAD and len(tensor) < layout.head_rows:
            tensor = torch.cat((tensor, tensor.new_zeros(layout.head_rows - len(tensor), *tensor.shape[1:])))
        if tensor.dim() == 4:
            tensor = tensor.permute(0, 2, 3, 1)
        if tuple(tensor.shape) != entry.shape:
            raise ValueError(f"tensor {entry.name} has the shape {tuple(tensor.shape)}, expected {entry.shape}")
        stored = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        blocks.append(Block(entry.name, entry.dtype, entry.shape, stored.data))
    if parameters:
        raise ValueError(f"the model has tensors that a {layout.architecture.name} has not: {', '.join(parameters)}")
    return blocks


def _stored_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape
