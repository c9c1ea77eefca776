"""How much of a checkpoint is no expert's, by the headers of its files: read without torch, for commands that check."""

import json
import struct
from pathlib import Path

from experts.moe.errors import ModelError

_MAX_HEADER_BYTES = 256 << 20


def dense_bytes(folder: Path) -> int:
    """Bytes of all weights that are no expert's, as stored. ModelError where there are none to be read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(folder, "has no *.safetensors: name a checkpoint in Hugging Face format")
    return sum(_dense_bytes(file) for file in files)


def _dense_bytes(file: Path) -> int:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(length, _MAX_HEADER_BYTES)))
        header.pop("__metadata__", None)
        spans = [tensor["data_offsets"] for name, tensor in header.items() if ".experts." not in name]
        return sum(end - begin for begin, end in spans)
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(file, f"is no safetensors file ({error}); fetch it again") from error
