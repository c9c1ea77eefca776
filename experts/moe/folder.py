"""A checkpoint's folder without torch, for commands that only check: bytes of its dense weights, state of its files."""

import json
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from experts.errors import WeightsError
from experts.moe.errors import ModelError
from experts.weights import open_weights, tensor_place

_MAX_HEADER_BYTES = 256 << 20

#: A tensor's type and shape, and where its bytes begin and end in the file.
StoredTensor = tuple[str, tuple[int, ...], int, int]
FileStates = tuple[tuple[str, int, int, int, int], ...]


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a checkpoint's file. Raises ModelError."""
    try:
        table = json.loads(file.read_bytes())
    except FileNotFoundError:
        problem = f"there is no {file.name}" if file.parent.is_dir() else "there is no such folder"
        raise ModelError(file.parent, f"{problem}; give the folder of a checkpoint in Hugging Face format") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(file, f"cannot be read as JSON ({error}); restore the file of the checkpoint") from error
    if not isinstance(table, dict):
        raise ModelError(file, "holds no JSON object; restore the file of the checkpoint")
    return table


def dense_bytes(folder: Path) -> int:
    """Return the stored bytes of all weights outside experts. Raises ModelError if there are none to read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(folder, "has no *.safetensors: name a checkpoint in Hugging Face format")
    places = (place for file in files for name, place in stored_tensors(file).items() if ".experts." not in name)
    return sum(end - begin for _, _, begin, end in places)


def open_part(file: Path) -> BinaryIO:
    """Open a regular file of a checkpoint, never a pipe. Raises ModelError or OSError."""
    try:
        return open_weights(file)
    except WeightsError:
        raise ModelError(file, "is not a regular file; fetch the checkpoint again") from None


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file, and check it against the file's size. Raises ModelError."""
    try:
        with open_part(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            prefix = opened.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            text = opened.read(length) if 2 <= length <= min(_MAX_HEADER_BYTES, size) else b""
    except OSError as error:
        raise ModelError(file, f"cannot be read ({error.strerror}); check the file's permissions") from error
    if not text:
        raise ModelError(file, f"is not a safetensors file ({size} bytes, no header); fetch the file again")
    start = 8 + length
    try:
        table = json.loads(text)
        table.pop("__metadata__", None)
        places = {name: (str(item["dtype"]), tensor_place(item)) for name, item in table.items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ModelError(file, "has a damaged header; fetch the file again") from error
    for name, (_, (_, _, end)) in places.items():
        if start + end > size:
            message = f"is truncated: tensor {name} ends {start + end - size} bytes after the file's {size}"
            raise ModelError(file, f"{message}; fetch the file again")
    return {name: (dtype, shape, start + begin, start + end) for name, (dtype, (shape, begin, end)) in places.items()}


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
