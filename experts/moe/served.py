"""What can be said of a checkpoint before it is in service, by its headers alone: does it fit, what does it take."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experts.moe.arch import MoeArch
from experts.moe.errors import ModelError
from experts.moe.model.keys_values import TextMemory, bytes_per_token, require_text_memory
from experts.moe.model.runtime import open_store, read_model, require_budget
from experts.moe.model.text import TextCodec
from experts.moe.modes import open_mode
from experts.moe.weights.dense import dense_bytes

FileStates = tuple[tuple[str, int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Served:
    """A model that may be served. `dense_bytes` are all weights that are no expert's."""

    arch: MoeArch
    dense_bytes: int


def examine(
    folder: Path,
    mode: str,
    options: Mapping[str, Any],
    memory_bytes: int,
    least_bytes: int,
    storage: str,
    *,
    text_bytes: int,
    max_new_tokens: int,
) -> Served:
    """Read configuration, headers, tokenizer and what the mode needs prepared; ModelError names the first mistake.

    Weights are not read. Imports transformers, which takes seconds.
    """
    model, arch, checkpoint = read_model(folder)
    if model.config.is_encoder_decoder:
        raise ModelError(folder, f"{arch.family} is an encoder-decoder, which is not served: name a decoder")
    opened = open_mode(mode, folder, options)
    require_budget(folder, arch, memory_bytes, lossless=opened.lossless)
    try:
        require_budget(folder, arch, least_bytes, lossless=opened.lossless)
    except ModelError as error:
        message = f"least_memory (a quarter of memory where it is not set): {error.message}"
        raise ModelError(folder, message) from error
    opened.require(memory_bytes, arch, folder)
    opened.close()
    open_store(arch, checkpoint, storage).close()
    TextCodec.open(folder)
    memory = TextMemory(bytes_per_token(model.config, arch.dtype), text_bytes)
    require_text_memory(folder, memory, arch.context_tokens, max_new_tokens)
    return Served(arch, dense_bytes(folder))


def file_states(folder: Path) -> FileStates:
    """What tells one state of a checkpoint's files from another: name, inode, size, times of the last changes."""
    found: list[tuple[str, int, int, int, int]] = []
    for file in sorted((*folder.glob("*.safetensors"), *folder.glob("*.json"))):
        try:
            state = file.stat()
        except OSError:
            continue
        found.append((file.name, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
    return tuple(found)
