import errno
import os
import time
from pathlib import Path

import pytest

from experts.memory import HostMemory
from experts.reading import CachedReader, FileReader, drop_cached
from tests.experts.direct import DirectReader
from tests.experts.paced import PacedReader
from tools.backup.gentle import absent_pages

SIZE_BYTES = (3 << 20) + 1234
READERS = {
    "cached": CachedReader,
    "direct": DirectReader,
    "paced": lambda: PacedReader(CachedReader(), 1e12),
}


def a_file(folder: Path, size_bytes: int = SIZE_BYTES) -> tuple[Path, bytes]:
    data = os.urandom(size_bytes)
    file = folder / "data"
    file.write_bytes(data)
    return file, data


def read(reader: FileReader, file: Path, size_bytes: int, offset: int, skew_bytes: int = 0) -> bytes:
    """`skew_bytes` moves the memory that is read into off its page boundary."""
    view = HostMemory(size_bytes + skew_bytes).view[skew_bytes:]
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


def drop_fully(file: Path) -> bool:
    """Drop the file's pages, again while Linux still uses some; return True once none is left, False after 5 s."""
    end_s = time.monotonic() + 5
    drop_cached(file)
    while in_page_cache(file) and time.monotonic() < end_s:
        time.sleep(0.01)
        drop_cached(file)
    return not in_page_cache(file)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("size_bytes", "offset", "skew_bytes"),
    [
        (2 << 20, 4096, 0),
        (2 << 20, 4096, 8),
        (SIZE_BYTES - 8192, 8192, 0),
        (5000, 4097, 0),
        (1, SIZE_BYTES - 1, 0),
        (0, 0, 1),
    ],
)
def test_every_reader_fills_the_view_wherever_it_lies(
    tmp_path: Path, name: str, size_bytes: int, offset: int, skew_bytes: int
):
    file, data = a_file(tmp_path)
    assert read(READERS[name](), file, size_bytes, offset, skew_bytes) == data[offset : offset + size_bytes]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("size_bytes", [8192, 10_000, 4 << 20])
def test_a_file_that_ends_early_says_by_how_much(tmp_path: Path, name: str, size_bytes: int):
    file, _ = a_file(tmp_path, size_bytes)
    reader = READERS[name]()
    with pytest.raises(EOFError, match="ends 5 bytes early"):
        read(reader, file, size_bytes + 5, 0)
    assert getattr(reader, "method", "direct") == "direct"


def test_direct_reads_leave_the_page_cache_alone_and_dropping_empties_it(tmp_path: Path):
    file, data = a_file(tmp_path)
    if not drop_fully(file):
        pytest.skip("this folder's filesystem lives in memory")
    direct = DirectReader()
    assert read(direct, file, 2 << 20, 0) == data[: 2 << 20]
    assert direct.method != "cached"
    if direct.method == "direct":
        assert not in_page_cache(file)
    read(CachedReader(), file, 2 << 20, 0)
    assert in_page_cache(file)
    assert drop_fully(file)


def test_other_errors_of_the_disk_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, _ = a_file(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    for make in READERS.values():
        with pytest.raises(OSError, match="Input/output error"):
            read(make(), file, 4096, 0)
