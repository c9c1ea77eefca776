from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and catalog of a small line, made once."""
    from tests.lines import make_experts

    folder = tmp_path_factory.mktemp("experts")
    make_experts(folder)
    return folder
