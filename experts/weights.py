"""Weights files: safetensors with one contiguous, page-aligned region in the order of a slot.

The file is `8 bytes header length | JSON header, padded with spaces | region`. The region starts on a multiple of 4096
bytes, each tensor in it on a multiple of 64; explicit `_pad.N` tensors fill the holes, which safetensors forbids. So a
slot takes a whole expert in one read. No torch here: `coserve check` and the catalog read headers.
"""

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from experts.durable import replacing
from experts.errors import WeightsError
from experts.spec import ExpertSpec

PAGE_BYTES = 4096
ALIGNMENT_BYTES = 64
#: Format 1 holds weights as a slot computes them, format 2 thinner (experts/stored.py): `stored` in its header.
FORMAT_VERSION, THIN_FORMAT_VERSION = "1", "2"
PADDING_PREFIX = "_pad."
#: Prefix of the name of a tensor's scales, one per output channel: its int8 values times these are its weights.
SCALE_PREFIX = "_scale."
_MAX_HEADER_BYTES = 4 << 20
#: Tensors and padding; networks of today have some hundreds.
_MAX_TENSORS = 20_000
_MAX_DIMENSIONS = 8
#: Bytes or elements: larger than any file.
_MAX_NUMBER = 2**60
ITEM_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1}
#: safetensors' names of the dtypes that slots compute with and files hold, by ours.
FILE_DTYPES: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8"}
#: Thin stored forms, by the dtype of their large tensors.
THIN_FORMS = ("bfloat16", "int8")


@dataclass(frozen=True, slots=True)
class Block:
    """One tensor to write: safetensors' dtype, shape as stored, bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Entry:
    """Position of one tensor: `begin` and `end` are bytes from the start of the region."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class WeightsHeader:
    """A weights file without its weights. `entries` are in file order, padding left out."""

    data_start: int
    region_bytes: int
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]

    @property
    def stored_as(self) -> str:
        """Return the thin form of the weights, "" if they are stored as computed."""
        return self.metadata.get("stored", "")

    @property
    def slot_bytes(self) -> int:
        if not self.stored_as:
            return self.region_bytes
        dtype = FILE_DTYPES.get(self.metadata.get("dtype", ""), "F32")
        weights = [entry for entry in self.entries if not entry.name.startswith(SCALE_PREFIX)]
        return plan_entries([(entry.name, dtype, entry.shape) for entry in weights])[1]


def plan_entries(shapes: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[tuple[Entry, ...], int]:
    """Lay out tensors (name, dtype, stored shape) in this order; return their positions and the region's bytes."""
    entries: list[Entry] = []
    offset = 0
    for name, dtype, shape in shapes:
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        entries.append(Entry(name, dtype, shape, offset, end))
        offset = _round_up(end, ALIGNMENT_BYTES)
    return tuple(entries), _round_up(offset, PAGE_BYTES)


def write_weights(path: Path, blocks: Sequence[Block], metadata: Mapping[str, str]) -> str:
    """Write the file whole or not at all and return its sha256. `stored` in `metadata` names a thin form."""
    entries, region_bytes = plan_entries([(block.name, block.dtype, block.shape) for block in blocks])
    head = _render_header(entries, region_bytes, metadata)
    digest = hashlib.sha256(head)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("wb") as file:
        file.write(head)
        position = 0
        for block, entry in zip(blocks, entries, strict=True):
            data = bytes(entry.begin - position) + bytes(block.data)
            position = entry.end
            digest.update(data)
            file.write(data)
        tail = bytes(region_bytes - position)
        digest.update(tail)
        file.write(tail)
    return digest.hexdigest()


def _render_header(entries: Sequence[Entry], region_bytes: int, metadata: Mapping[str, str]) -> bytes:
    version = THIN_FORMAT_VERSION if "stored" in metadata else FORMAT_VERSION
    table: dict[str, Any] = {"__metadata__": {"coserve_format": version, **metadata}}
    ends = [entry.begin for entry in entries[1:]] + [region_bytes]
    for number, (entry, next_begin) in enumerate(zip(entries, ends, strict=True)):
        table[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.begin, entry.end]}
        if next_begin > entry.end:
            hole = {"dtype": "U8", "shape": [next_begin - entry.end], "data_offsets": [entry.end, next_begin]}
            table[f"{PADDING_PREFIX}{number}"] = hole
    text = json.dumps(table, separators=(",", ":")).encode()
    text = text.ljust(_round_up(8 + len(text), PAGE_BYTES) - 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> WeightsHeader:
    """Read a header and check it against the file's size. Raises WeightsError."""
    try:
        with open_weights(path) as file:
            return read_header_from(file.fileno(), path)
    except OSError as error:
        raise WeightsError(path, describe_os_error(error)) from error


def open_weights(path: Path) -> BinaryIO:
    """Open a regular file, without waiting for the writer of a pipe. Raises OSError or WeightsError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise WeightsError(path, "is not a regular file; correct `file` in the catalog or import the expert again")


def read_header_from(descriptor: int, path: Path) -> WeightsHeader:
    """Read the header of an open file; `path` is for messages."""
    file_bytes = os.fstat(descriptor).st_size
    prefix = os.pread(descriptor, 8, 0)
    if len(prefix) < 8:
        raise WeightsError(path, f"has {file_bytes} bytes and no header; import the expert again")
    (length,) = struct.unpack("<Q", prefix)
    if not 2 <= length <= _MAX_HEADER_BYTES:
        raise WeightsError(path, "is not a safetensors file (its header length is impossible); import it again")
    header = _parse_header(os.pread(descriptor, length, 8), 8 + length, path)
    expected_bytes = header.data_start + header.region_bytes
    if file_bytes != expected_bytes:
        problem = "truncated" if file_bytes < expected_bytes else "too long"
        raise WeightsError(path, f"is {problem}: {file_bytes} bytes where {expected_bytes} belong; import it again")
    return header


def _parse_header(text: bytes, data_start: int, path: Path) -> WeightsHeader:
    try:
        table = json.loads(text)
        metadata = {str(key): str(value) for key, value in table.pop("__metadata__", {}).items()}
        entries = [_parse_entry(name, item) for name, item in islice(table.items(), _MAX_TENSORS)]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise WeightsError(path, "has a damaged header; import the expert again") from error
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    if len(table) > _MAX_TENSORS:
        raise WeightsError(path, f"has {len(table)} tensors, at most {_MAX_TENSORS} are read; import the model anew")
    position = 0
    for entry in entries:
        if entry.begin != position or entry.end - entry.begin != math.prod(entry.shape) * ITEM_BYTES.get(
            entry.dtype, 0
        ):
            raise WeightsError(path, f"has a damaged header at tensor {entry.name}; import the expert again")
        position = entry.end
    written = metadata.get("coserve_format")
    if written is None:
        raise WeightsError(path, "was not written by `coserve import`; import the original model file")
    remedy = "import the original model file here, or install the version that wrote it"
    if written not in (FORMAT_VERSION, THIN_FORMAT_VERSION):
        known = f"formats {FORMAT_VERSION} and {THIN_FORMAT_VERSION}"
        raise WeightsError(path, f"has format {written}, and this version reads {known}; {remedy}")
    stored_as = metadata.get("stored")
    if stored_as not in ((None,) if written == FORMAT_VERSION else THIN_FORMS):
        known = ", ".join(THIN_FORMS)
        raise WeightsError(path, f"stores its weights as {stored_as}, and this version reads {known}; {remedy}")
    if data_start % PAGE_BYTES or not entries:
        raise WeightsError(path, "was rewritten by another program; import the original model file again")
    tensors = tuple(entry for entry in entries if not entry.name.startswith(PADDING_PREFIX))
    return WeightsHeader(data_start, position, tensors, metadata)


def _parse_entry(name: str, item: Mapping[str, Any]) -> Entry:
    if not isinstance(item["dtype"], str):
        raise TypeError(name)
    return Entry(name, item["dtype"], *tensor_place(item))


def tensor_place(item: Mapping[str, Any]) -> tuple[tuple[int, ...], int, int]:
    """Return a tensor's shape, begin and end in bytes from its entry in a safetensors header.

    Raises ValueError, TypeError or KeyError for numbers that no file can have, before their product could take long.
    """
    shape, (begin, end) = item["shape"], item["data_offsets"]
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError("too many dimensions")
    if not all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in (*shape, begin, end)):
        raise ValueError("not a number of bytes or elements")
    return tuple(shape), begin, end


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_sha256(spec: ExpertSpec) -> None:
    """Read the whole weights file and compare its sha256 with the catalog's. Raises WeightsError."""
    try:
        digest = file_sha256(spec.file)
    except OSError as error:
        raise WeightsError(spec.file, describe_os_error(error)) from error
    check_digest(digest, spec)


def check_digest(digest: str, spec: ExpertSpec) -> None:
    """Raise WeightsError if a file's bytes do not match the catalog's sha256."""
    if digest != spec.sha256:
        message = f"its contents changed: sha256 is {digest[:12]}…, the catalog says {spec.sha256[:12]}…"
        raise WeightsError(spec.file, f"{message}; restore the file or import the expert again")


def describe_os_error(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such weights file; put it back, correct `file` in the catalog, or import the expert again"
    return f"cannot be read ({error.strerror or error}); check the disk and the file's permissions"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
