import shutil
from pathlib import Path

import pytest

from tests.contract.client import Line


@pytest.fixture
def line(judged: Line, tmp_path: Path) -> Path:
    """A copy of the judged line's folder, to change something in."""
    target = tmp_path / "line"
    shutil.copytree(judged.folder, target, ignore=shutil.ignore_patterns("run", "*.safetensors"))
    return target
