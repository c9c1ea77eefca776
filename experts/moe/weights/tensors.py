"""Everything of a model that is not an expert: read from the files, assigned to the model built on `meta`."""

from typing import Any

import torch
from torch import nn

from experts.moe.errors import ModelError
from experts.moe.weights.checkpoint import Checkpoint, TensorLocation
from experts.moe.weights.expert_store import WeightFiles


def load_tensors(model: Any, checkpoint: Checkpoint, device: str) -> None:
    """Give the model its weights: each read, converted to its type in the model, put on `device`, tied, buffers made.

    Afterwards nothing of the model is on `meta`. Raises ModelError.
    """
    files = WeightFiles()
    state: dict[str, torch.Tensor] = {}
    try:
        for name, there in model.state_dict().items():
            tensor = checkpoint.tensors.get(name)
            if tensor is not None:
                state[name] = read_tensor(files, tensor).to(device=device, dtype=there.dtype)
    finally:
        files.close()
    missing = set(model.load_state_dict(state, strict=False, assign=True).missing_keys)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    model.requires_grad_(requires_grad=False)
    rebuild_buffers(model, device)
    left = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if left:
        raise ModelError(checkpoint.folder, f"nothing gives {left[0]} its value; this version cannot run the model")


def read_tensor(files: WeightFiles, tensor: TensorLocation) -> torch.Tensor:
    """One tensor of a checkpoint as stored. Raises ModelError."""
    raw = torch.empty(tensor.size_bytes, dtype=torch.uint8)
    if tensor.size_bytes:
        files.read(tensor.file, raw.numpy().data, tensor.offset)
    return raw.view(tensor.dtype).view(tensor.shape)


def rebuild_buffers(model: Any, device: str) -> None:
    """Buffers that no checkpoint holds (rotary frequencies) are computed again, off `meta`."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            fresh: nn.Module = type(module)(config=module.config)
            for key, buffer in module.named_buffers(recurse=False):
                persistent = f"{name}.{key}" in model.state_dict()
                module.register_buffer(key, fresh.get_buffer(key).to(device, buffer.dtype), persistent=persistent)
            for key in vars(fresh):
                if key.startswith("original_") and isinstance(getattr(module, key, None), torch.Tensor):
                    setattr(module, key, getattr(fresh, key).to(device))
