import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if find_spec("coserve_client") is None:
    raise pytest.UsageError(
        "coserve_client is not installed: this environment is older than pyproject.toml. Run "
        "`.venv/bin/python -m pip install --no-deps --no-build-isolation --editable .`"
    )

# Rich's console keeps the width that the environment names when it is made, for all tests of this process.
os.environ.pop("COLUMNS", None)
import tools.terminal.console  # noqa: F401
from tests.house.times import (  # noqa: F401 - hooks
    pytest_runtest_protocol,
    pytest_sessionfinish,
    pytest_sessionstart,
    pytest_terminal_summary,
)
from tests.tiers import pytest_addoption, pytest_configure, pytest_ignore_collect  # noqa: F401 - hooks

# Under `nohup` every child would inherit a SIGHUP that does nothing.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example may take long on a busy machine.
settings.register_profile("coserve", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
#: Other examples each time, for `make test-all`: what `make test` says must not hang on chance.
settings.register_profile("search", settings.get_profile("coserve"), derandomize=False)
settings.load_profile("coserve")

if TYPE_CHECKING:
    from tests.daemon.storage.database.postgresql_server import Server


@pytest.fixture(autouse=True)
def _own_priority() -> Iterator[None]:
    """Take back the priority that a command gave up when it was called in this process: later tests would be slow."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    if os.getpriority(os.PRIO_PROCESS, 0) != before:
        with suppress(PermissionError):  # for root alone
            os.setpriority(os.PRIO_PROCESS, 0, before)


@pytest.fixture(scope="session")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Catalog and weights files of a small line, for simulated devices (tests/simulated.py); made once."""
    from tests.simulated import make_experts

    folder = tmp_path_factory.mktemp("experts")
    make_experts(folder)
    return folder


@pytest.fixture(scope="session")
def torch_experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same experts as real networks, for `coserve run` and torch; made once."""
    from tests.lines import make_experts

    folder = tmp_path_factory.mktemp("torch_experts")
    make_experts(folder)
    return folder


@pytest.fixture(scope="session")
def version_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of experts: P and Q, and another version of P that answers the other way round."""
    from tests.lines import make_versions

    folders = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    make_versions(*folders)
    return folders


@pytest.fixture(scope="session")
def postgresql() -> Iterator["Server"]:
    """Return a PostgreSQL server for hubs; a test that stops it starts it again."""
    from tests.daemon.storage.database.postgresql_server import WANTED, a_server, programs

    pytest.importorskip("psycopg", reason=WANTED)
    if programs() is None:
        pytest.skip(WANTED)
    with a_server() as server:
        yield server
