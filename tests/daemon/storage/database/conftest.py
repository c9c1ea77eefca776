"""A line on a database of its own, which is closed after each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.storage.database.reader import ResultsReader
from tests.daemon.storage.database.store_parts import Line, a_line


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = a_line(tmp_path)
    yield line
    line.store.close()


@pytest.fixture
def reader(line: Line) -> Iterator[ResultsReader]:
    reader = line.reader()
    yield reader
    reader.close()
