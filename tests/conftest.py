from pathlib import Path

import pytest

#: The longest way first: it trains, and the other worker does the rest meanwhile.
FIRST = "tests/contract/test_demo.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


@pytest.fixture(scope="session")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and catalog of a small line, made once."""
    from tests.lines import make_experts

    folder = tmp_path_factory.mktemp("experts")
    make_experts(folder)
    return folder
