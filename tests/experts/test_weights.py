import hashlib
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from experts.errors import WeightsError
from experts.reading import CachedReader
from experts.weights import ALIGNMENT_BYTES, PAGE_BYTES, Block, read_header, write_weights


def some_blocks() -> list[Block]:
    arrays = {"first": np.arange(6, dtype=np.float32).reshape(2, 3), "odd": np.ones(7, dtype=np.float32)}
    return [Block(name, "F32", array.shape, array.tobytes()) for name, array in arrays.items()]


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path):
    file = tmp_path / "w.safetensors"
    write_weights(file, some_blocks(), {"origin": "here"})
    with safe_open(file, "np") as opened:
        assert opened.metadata()["origin"] == "here"
        np.testing.assert_array_equal(opened.get_tensor("first"), np.arange(6, dtype=np.float32).reshape(2, 3))
        np.testing.assert_array_equal(opened.get_tensor("odd"), np.ones(7, dtype=np.float32))


def test_the_region_starts_on_a_page_and_every_tensor_on_a_cache_line(tmp_path: Path):
    file = tmp_path / "w.safetensors"
    sha256 = write_weights(file, some_blocks(), {})
    header = read_header(file)
    assert header.data_start % PAGE_BYTES == 0
    assert header.region_bytes % PAGE_BYTES == 0
    assert [entry.begin % ALIGNMENT_BYTES for entry in header.entries] == [0, 0]
    assert [entry.name for entry in header.entries] == ["first", "odd"]
    assert sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def damaged(file: Path, damage: str) -> None:
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        del data[-1:]
    elif damage == "too long":
        data += b"x"
    elif damage == "empty":
        data.clear()
    elif damage == "not safetensors":
        data[:8] = b"\xff" * 8
    elif damage == "damaged header":
        data[8:40] = b"?" * 32
    elif damage == "another program":
        text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        data = bytearray(struct.pack("<Q", len(text)) + text + bytes(4))
    elif damage == "hole":
        length = struct.unpack("<Q", data[:8])[0]
        table = json.loads(data[8 : 8 + length])
        table["odd"]["data_offsets"] = [68, 96]
        data[8 : 8 + length] = json.dumps(table, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    ["truncated", "too long", "empty", "not safetensors", "damaged header", "another program", "hole"],
)
def test_a_damaged_file_is_refused_with_its_name_and_what_to_do(tmp_path: Path, damage: str):
    file = tmp_path / "w.safetensors"
    write_weights(file, some_blocks(), {})
    damaged(file, damage)
    with pytest.raises(WeightsError, match=r"w\.safetensors.*import") as caught:
        read_header(file)
    assert caught.value.file == file


def with_header(file: Path, text: bytes) -> None:
    """Give a weights file another header, in the room that the old one has."""
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    text = text.ljust(length)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def a_header(**changes: str) -> bytes:
    item = {"dtype": '"F32"', "shape": "[2, 3]", "data_offsets": "[0, 24]"} | changes
    fields = ", ".join(f'"{name}": {value}' for name, value in item.items())
    return f'{{"__metadata__": {{"coserve_format": "1"}}, "first": {{{fields}}}}}'.encode()


@pytest.mark.parametrize(
    "text",
    [
        a_header(shape="[1e400, 1]"),
        a_header(data_offsets="[0, 1e400]"),
        a_header(data_offsets="[0, NaN]"),
        a_header(dtype='["F32"]'),
        a_header(dtype='{"a": 1}'),
        a_header(shape="[-2, -3]"),
        a_header(shape="[true, 6]"),
        a_header(shape=f"[{'9' * 4000}, 1]"),
        a_header(shape=f"[{'9' * 5000}, 1]"),
        a_header(shape=f"[{','.join(['9' * 4000] * 4000)}]"),
        a_header(shape="[" * 100_000 + "]" * 100_000),
        b"[" * 100_000,
        b'{"a": ' * 100_000,
        b"[1, 2]",
        b"7",
    ],
    ids=range(15),
)
def test_a_header_of_impossible_values_is_refused_at_once(tmp_path: Path, text: bytes):
    file = tmp_path / "w.safetensors"
    write_weights(file, some_blocks(), {})
    with_header(file, text)
    with pytest.raises(WeightsError, match=r"w\.safetensors.*import"):
        read_header(file)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str):
    place = tmp_path / "w.safetensors"
    {"pipe": lambda: os.mkfifo(place), "folder": place.mkdir, "device": lambda: place.symlink_to("/dev/zero")}[kind]()
    with pytest.raises(WeightsError, match="regular file"):
        read_header(place)
    if kind == "pipe":
        os.close(CachedReader().open(place))


def test_a_header_of_very_many_tensors_is_refused_at_once(tmp_path: Path):
    file = tmp_path / "w.safetensors"
    write_weights(file, some_blocks(), {})
    empty = ",".join(f'"t{number}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for number in range(30_000))
    with_header(file, f'{{"__metadata__":{{"coserve_format":"1"}},{empty}}}'.encode())
    with pytest.raises(WeightsError, match="30000 tensors"):
        read_header(file)
