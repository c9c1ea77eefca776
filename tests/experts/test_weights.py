import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from experts.errors import WeightsError
from experts.weights import ALIGNMENT_BYTES, PAGE_BYTES, Block, read_header, verify_sha256, write_weights
from tests.experts.samples import an_expert_file


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


def test_files_of_one_layout_have_the_same_offsets(tmp_path: Path):
    first = read_header(an_expert_file(tmp_path, "one", class_count=3, seed=1).file)
    second = read_header(an_expert_file(tmp_path, "other", class_count=9, seed=2).file)
    assert first.metadata["layout"] == second.metadata["layout"]
    assert first.entries == second.entries


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


def test_a_missing_file_says_so(tmp_path: Path):
    with pytest.raises(WeightsError, match="no such weights file"):
        read_header(tmp_path / "none.safetensors")


def test_one_flipped_bit_fails_the_sha256(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    verify_sha256(spec)
    data = bytearray(spec.file.read_bytes())
    data[-PAGE_BYTES - 100] ^= 1
    spec.file.write_bytes(data)
    with pytest.raises(WeightsError, match="contents changed"):
        verify_sha256(spec)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path):
    file = tmp_path / "w.safetensors"
    write_weights(file, some_blocks(), {})
    before = file.read_bytes()
    blocks = [Block("first", "F32", (2,), memoryview(b"12345678").cast("B")), Block("bad", "F32", (1,), None)]
    with pytest.raises(TypeError):
        write_weights(file, blocks, {})
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
