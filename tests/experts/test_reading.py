import errno
import os
import time
from pathlib import Path

import pytest

from experts.memory import HostMemory
from experts.reading import CachedReader, drop_cached
from tools.backup.gentle import absent_pages

SIZE_BYTES = (3 << 20) + 1234


def a_file(folder: Path) -> tuple[Path, bytes]:
    data = os.urandom(SIZE_BYTES)
    file = folder / "data"
    file.write_bytes(data)
    return file, data


def read(file: Path, size_bytes: int, offset: int) -> bytes:
    reader, view = CachedReader(), HostMemory(size_bytes).view
    descriptor = reader.open(file)
    try:
        reader.read(descriptor, view, offset)
    finally:
        os.close(descriptor)
    return bytes(view)


def in_page_cache(file: Path) -> bool:
    size_bytes = file.stat().st_size
    with file.open("rb") as opened:
        absent = absent_pages(opened.fileno(), 0, size_bytes)
    return sum(length for _, length in absent) < size_bytes


def test_a_read_fills_the_view_wherever_it_begins_and_one_that_ends_early_says_by_how_much(tmp_path: Path):
    file, data = a_file(tmp_path)
    for size_bytes, offset in ((2 << 20, 4096), (5000, 4097), (1, SIZE_BYTES - 1)):
        assert read(file, size_bytes, offset) == data[offset : offset + size_bytes]
    with pytest.raises(EOFError, match="ends 5 bytes early"):
        read(file, SIZE_BYTES + 5, 0)


def test_dropping_a_file_empties_the_page_cache_of_it(tmp_path: Path):
    file, _ = a_file(tmp_path)
    end_s = time.monotonic() + 5
    while in_page_cache(file):  # again while Linux still uses some pages
        if time.monotonic() > end_s:
            pytest.skip("this folder's filesystem lives in memory")
        drop_cached(file)
        time.sleep(0.01)
    read(file, 2 << 20, 0)
    assert in_page_cache(file)


def test_other_errors_of_the_disk_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, _ = a_file(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read(file, 4096, 0)
