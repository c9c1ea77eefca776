"""A tiny language model with random weights that reads and writes bytes, for tests that generate text."""

from pathlib import Path
from typing import Any

from tests.experts.moe.tiny import CONTEXT, write_tiny

__all__ = ["CONTEXT", "EXPERTS", "EXPERT_BYTES", "a_byte_tokenizer", "a_text_model"]

#: Of the tiny Mixtral: 3 layers of 8 experts, (48 + 24) x 32 float32 each.
EXPERTS = 24
EXPERT_BYTES = 9216


def a_byte_tokenizer() -> Any:
    """A token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def a_text_model(folder: Path, **changes: Any) -> Path:
    """A checkpoint in Hugging Face format; 0.3 MB."""
    write_tiny(folder, "mixtral", **{"vocab_size": 256, **changes})
    a_byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
