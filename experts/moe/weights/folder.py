"""A checkpoint's folder without torch, for commands that only check: bytes of its dense weights, state of its files."""

import json
import struct
from pathlib import Path

from experts.moe.errors import ModelError
from experts.weights import tensor_place

MAX_HEADER_BYTES = 256 << 20

FileStates = tuple[tuple[str, int, int, int, int], ...]


def dense_bytes(folder: Path) -> int:
    """Return the stored bytes of all weights outside experts. Raises ModelError if there are none to read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(folder, "has no *.safetensors: name a checkpoint in Hugging Face format")
    return sum(_dense_bytes(file) for file in files)


def _dense_bytes(file: Path) -> int:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(length, MAX_HEADER_BYTES)))
        header.pop("__metadata__", None)
        places = [tensor_place(tensor) for name, tensor in header.items() if ".experts." not in name]
        return sum(end - begin for _, begin, end in places)
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(file, f"is not a safetensors file ({error}); fetch it again") from error


def file_states(folder: Path) -> FileStates:
    """Return name, inode, size and times of each file of a checkpoint; they differ once a file has changed."""
    states: list[tuple[str, int, int, int, int]] = []
    for file in sorted((*folder.glob("*.safetensors"), *folder.glob("*.json"))):
        try:
            status = file.stat()
        except OSError:
            continue
        states.append((file.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(states)
