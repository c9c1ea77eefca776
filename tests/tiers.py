"""`make test-fast` is `pytest --fast`: files of FAST without the marker `not_fast`, and a guard over them."""

import multiprocessing.process
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests import ROOT

#: Folders below tests/: rules, policies, settings, journal and database, the drive on a simulated clock.
FAST = (
    "daemon/config",
    "daemon/dispatch",
    "daemon/intake",
    "daemon/line",
    "daemon/policy",
    "daemon/storage",
    "daemon/wire",
    "experts/moe/policy",
    "house",
    "promises",
    "routing_rules",
    "tools/simulate",
)
_MARKER = "pytest.mark.not_fast"
_MAX_SLEEP_S = 0.02
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
_REMEDY = 'Leave it out, or write `pytestmark = pytest.mark.not_fast("why")` into the file.'


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="collect only what needs no torch, process or sleep")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that is not fast: it may import torch."""
    tests = ROOT / "tests"
    if not config.getoption("fast") or tests not in collection_path.parents:
        return None
    path = collection_path.relative_to(tests).as_posix()
    if any(path == place or path.startswith(f"{place}/") for place in FAST):
        return True if collection_path.suffix == ".py" and _MARKER in collection_path.read_text("utf-8") else None
    return None if any(place.startswith(f"{path}/") for place in FAST) else True


def pytest_configure(config: pytest.Config) -> None:
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if config.getoption("fast") and not starts_workers:
        config.pluginmanager.register(FastTestGuard(), "fast-test-guard")


class FastTestGuard:
    """Fails a test, or the import of its file, that imports torch, starts a process or sleeps."""

    def __init__(self) -> None:
        self._now = "the start"
        self._is_watching = False
        self._sleep, self._start = time.sleep, multiprocessing.process.BaseProcess.start
        if "torch" in sys.modules:
            raise pytest.UsageError("torch is imported before any fast test: see tests/conftest.py")
        time.sleep = self._checked_sleep
        multiprocessing.process.BaseProcess.start = self._refuse_start
        sys.addaudithook(self._audit)

    def _checked_sleep(self, seconds: float) -> None:
        if self._is_watching and seconds > _MAX_SLEEP_S:
            self._fail(f"sleeps {seconds:g} s")
        self._sleep(seconds)

    def _refuse_start(self, *_: Any) -> NoReturn:
        self._fail("starts a process (multiprocessing)")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Refuse imports of torch and starts of processes; an audit hook cannot be removed again."""
        if not self._is_watching:
            return
        if event == "import" and arguments[0] == "torch":
            self._fail("imports torch")
        if event in _STARTS:
            self._fail(f"starts a process ({event})")

    def _fail(self, deed: str) -> NoReturn:
        pytest.fail(f"{self._now} {deed}, which no fast test does. {_REMEDY}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Begin here: a worker of xdist asks `uname` before."""
        self._is_watching = True

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        self._now = collector.nodeid
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now = item.nodeid
        return (yield)

    def pytest_unconfigure(self) -> None:
        self._is_watching = False
        time.sleep, multiprocessing.process.BaseProcess.start = self._sleep, self._start
