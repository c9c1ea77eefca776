"""The tiers of the tests: which files stand in which, and what the fast tier forbids.

`pytest --tier fast` collects the files of FAST and imports no others; `--tier contract` those of CONTRACT. Without
`--tier` everything runs.
"""

import multiprocessing.process
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests import ROOT

#: Folders and files below tests/: rules, policies, settings, journal and database, the drive on a simulated clock.
FAST = (
    "daemon/config",
    "daemon/dispatch",
    "daemon/host/test_lock.py",
    "daemon/host/test_machine.py",
    "daemon/intake",
    "daemon/line",
    "daemon/monitor/test_timeline.py",
    "daemon/policy",
    "daemon/storage",
    "daemon/test_confined.py",
    "daemon/test_units.py",
    "daemon/wire",
    "experts/moe/policy",
    "experts/test_drift.py",
    "experts/test_ledger.py",
    "house",
    "routing_rules",
    "test_configuration_page.py",
    "test_promises.py",
    "test_reliability_page.py",
    "tools/camera/test_render.py",
    "tools/cli/test_keys_command.py",
    "tools/cli/test_progress.py",
    "tools/query/test_report_without_daemon.py",
    "tools/setup/test_install_service.py",
    "tools/simulate",
)
#: Wire, database, pages and commands, on lines with simulated devices, and one file with torch; without what is fast.
CONTRACT = (
    "contract",
    "daemon",
    "test_readme.py",
    "test_tiers.py",
    "test_wire_pages.py",
    "tools/cli",
    "tools/client",
    "tools/query",
    "tools/setup",
)
_PROCESSES, _SOCKETS, _TORCH = "starts processes", "waits for sockets and time", "computes with torch"
#: What lies in a folder above and is not in its tier: why.
NOT_FAST = {
    "daemon/dispatch/test_drive_devices.py": _TORCH,
    "daemon/dispatch/test_executors.py": _TORCH,
    "daemon/dispatch/test_loader.py": _TORCH,
    "daemon/dispatch/test_watchdog_of_executors.py": _TORCH,
    "daemon/intake/test_damaged_pictures.py": _PROCESSES,
    "daemon/intake/test_intake.py": _SOCKETS,
    "daemon/intake/test_overload.py": _SOCKETS,
    "daemon/storage/database/test_migrate.py": _PROCESSES,
    "daemon/storage/test_containment.py": _TORCH,
    "daemon/storage/test_database_watch.py": _PROCESSES,
    "daemon/storage/test_results_stream.py": _SOCKETS,
    "daemon/storage/test_retention.py": _PROCESSES,
    "daemon/storage/test_review_requests.py": _PROCESSES,
    "daemon/storage/test_writer.py": _PROCESSES,
    "daemon/wire/test_connection_guard.py": _SOCKETS,
    "daemon/wire/test_keys.py": _SOCKETS,
    "routing_rules/test_deeppcb_example.py": _TORCH,
}
NOT_CONTRACT = {
    "contract/test_demo.py": "trains",
    "contract/test_no_outbound.py": _TORCH,
    "contract/test_texts.py": _TORCH,
    "contract/test_untrusted_files.py": _TORCH,
    "contract/test_versions_live.py": _TORCH,
    "daemon/dispatch": _TORCH,
    "daemon/language/test_model_check.py": _TORCH,
    "daemon/language/test_served_model.py": _TORCH,
    "daemon/storage/test_containment.py": _TORCH,
    "tools/query/test_rejudge.py": _TORCH,
}

_LISTED = {"fast": (FAST, NOT_FAST), "contract": (CONTRACT, NOT_CONTRACT)}
_MAX_SLEEP_S = 0.02
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
_REMEDY = "Leave it out, or move the test to a file that tests/tiers.py does not name in FAST."


def is_in(tier: str, path: str) -> bool:
    """Return True if the file `path` (below tests/) is in the tier."""
    listed, excluded = _LISTED[tier]
    if tier == "contract" and is_in("fast", path):
        return False
    return _lies_in(path, listed) and not _lies_in(path, excluded)


def _lies_in(path: str, places: Any) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _leads_to(folder: str, tier: str) -> bool:
    listed, excluded = _LISTED[tier]
    above = any(place.startswith(f"{folder}/") for place in listed)
    return above or (_lies_in(folder, listed) and folder not in excluded)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=sorted(_LISTED), help="collect the files of this tier only (tests/tiers.py)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    tier, tests = config.getoption("tier"), ROOT / "tests"
    if tier is None or tests not in collection_path.parents:
        return None
    path = collection_path.relative_to(tests).as_posix()
    wanted = _leads_to(path, tier) if collection_path.is_dir() else is_in(tier, path)
    return None if wanted else True


def pytest_configure(config: pytest.Config) -> None:
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if config.getoption("tier") == "fast" and not starts_workers:
        config.pluginmanager.register(FastTierGuard(), "fast-tier-guard")


class FastTierGuard:
    """Fails a test, or the import of its file, that imports torch, starts a process or sleeps."""

    def __init__(self) -> None:
        self._now = "the start"
        self._violations: list[str] = []
        self._is_watching = False
        self._sleep, self._start = time.sleep, multiprocessing.process.BaseProcess.start
        if "torch" in sys.modules:
            raise pytest.UsageError("torch is imported before any test of the fast tier: see tests/conftest.py")
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
        message = f"{self._now} {deed}, which no test of the fast tier does. {_REMEDY}"
        self._violations.append(message)
        pytest.fail(message)

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
        self._violations.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Fail the test too where another thread, or an `except`, took the failure."""
        result = yield
        if self._violations:
            pytest.fail(self._violations[0])
        return result

    def pytest_unconfigure(self) -> None:
        self._is_watching = False
        time.sleep, multiprocessing.process.BaseProcess.start = self._sleep, self._start
