"""Check a checkpoint before it is in service, by its headers alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experts.moe.errors import ModelError
from experts.moe.model.keys_values import TextMemory, bytes_per_token, require_text_memory
from experts.moe.model.mode import Mode
from experts.moe.model.runtime import open_store, read_model
from experts.moe.model.text import TextCodec
from experts.moe.modes import open_mode


def require_servable(
    folder: Path,
    mode: str,
    options: Mapping[str, Any],
    memory_bytes: int,
    min_memory_bytes: int,
    storage: str,
    *,
    text_bytes: int,
    max_new_tokens: int,
) -> None:
    """Raise ModelError for the first mistake in configuration, headers, tokenizer, prepared files or memory.

    Weights are not read. Imports transformers, which takes seconds.
    """
    model, arch, checkpoint = read_model(folder)
    if model.config.is_encoder_decoder:
        raise ModelError(folder, f"{arch.family} is an encoder-decoder, which is not served: name a decoder")
    opened = open_mode(mode, folder, options)
    opened.require_budget(memory_bytes, arch, folder)
    try:
        # Only the general minimum: a mode that cannot shrink so far keeps its memory while serving.
        Mode.require_budget(opened, min_memory_bytes, arch, folder)
    except ModelError as error:
        message = f"least_memory (a quarter of memory where it is not set): {error.message}"
        raise ModelError(folder, message) from error
    opened.close()
    open_store(arch, checkpoint, storage).close()
    TextCodec.open(folder)
    memory = TextMemory(bytes_per_token(model.config, arch.dtype), text_bytes)
    require_text_memory(folder, memory, arch.context_tokens, max_new_tokens)
