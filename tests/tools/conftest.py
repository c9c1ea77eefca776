from pathlib import Path

import pytest

from tests.contract.client import Line


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Line:
    """A line that has judged in every way, run once; a test that changes something copies its folder."""
    from tests.tools.query.judged_line import judged_line

    return judged_line(tmp_path_factory.mktemp("asked") / "line", experts_folder)
